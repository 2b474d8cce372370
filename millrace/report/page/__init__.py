"""The report of a run: one HTML file with charts and samples, and nothing remote in it."""
