"""The report of a run: one HTML file with charts and samples, and nothing remote in it."""

from millrace.report.page.write import write_report

__all__ = ["write_report"]
