"""Accounts, trace, samples, report, live page and advice of a run."""
