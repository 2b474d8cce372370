"""A hook of mkdocs: rows of algorithms.md for losses and estimators that its tables lack.

A new loss or estimator is one file. Its docstring is its row here, until somebody writes a better
one into the page.
"""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Complete the tables of algorithms.md."""
    return completed(markdown) if page.file.src_uri == "algorithms.md" else markdown


def completed(markdown: str) -> str:
    """Return the page with a row for each loss and each estimator of the package."""
    from millrace.algorithms.estimators import ESTIMATORS
    from millrace.algorithms.losses import POLICY_LOSSES

    trust = {name: "yes" if loss.bounds_stale else "no" for name, loss in POLICY_LOSSES.items()}
    markdown = _add(markdown, "## Advantage estimators", ESTIMATORS, {})
    return _add(markdown, "## Policy losses", POLICY_LOSSES, trust)


def _add(markdown: str, heading: str, known: dict[str, Any], trust: dict[str, str]) -> str:
    """Return the page with rows at the end of the first table below a heading."""
    begin = re.search(rf"^{heading}\n(?:(?!\|).*\n)*(?:\|.*\n)*", markdown, re.MULTILINE)
    assert begin is not None, f"algorithms.md has no {heading}"
    rows = ""
    for name, algorithm in known.items():
        if f"| `{name}` |" in begin[0]:
            continue
        text = " ".join((algorithm.function.__doc__ or "").split())
        if not text:
            raise ValueError(f"{name} has no docstring, which is its row in algorithms.md")
        source = ", ".join(re.findall(r"\b\d{4}\.\d{5}\b", text))
        cells = [f"`{name}`", text.replace("|", "\\|"), *([trust[name]] if trust else []), source]
        rows += f"| {' | '.join(cells)} | |\n"
    return markdown[: begin.end()] + rows + markdown[begin.end() :]
