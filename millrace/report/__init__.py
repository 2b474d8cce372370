"""What a run leaves for its readers: accounts, a trace, samples, a report, a live page, advice."""
