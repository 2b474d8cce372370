"""Run folders, made by the writers of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millrace.config import recipe
from millrace.observe.sinks import JsonLines
from millrace.persist.history import History
from millrace.run import folder
from millrace.schedule.ledger import Totals

WINDOW = 64
"""Samples of each version of the quickstart."""


def row(version: int, **more: float) -> dict[str, float]:
    """Return some figures of a version's row."""
    return {
        "reward/mean": version / 100,
        "staleness/mean": 0.5,
        "staleness/max": 2.0,
        "timing_s/step": 2.0,
        "train/samples": float(WINDOW),
        "trainer/idle_ratio": 0.25,
        "rollouter/tokens_per_s": 1234.0,
        **more,
    }


def totals(version: int) -> Totals:
    return Totals(
        version=version,
        admitted=WINDOW * version + 32,
        retired=WINDOW * version,
        dropped={},
        slots=list(range(WINDOW * version, WINDOW * version + 32)),
    )


class Run:
    """A run without engines: it writes what a run writes, and holds the lock of its folder."""

    def __init__(self, path: Path, *overrides: str, resumed_from: int | None = None) -> None:
        self.path = path
        resume = "never" if resumed_from is None else "auto"
        keys = [f"trainer.run_dir={path}", f"trainer.resume={resume}", *overrides]
        folder.open_run_dir(recipe.load("quickstart", keys))
        self.metrics = JsonLines(path / "metrics.jsonl", resumed_from)
        self.history = History(path, totals(resumed_from or 0))

    def version(self, version: int, **more: float) -> None:
        self.history.version(totals(version), list(range(WINDOW * (version - 1), WINDOW * version)))
        self.metrics.write(version, row(version, **more))

    def end(self, version: int, complete: bool) -> None:
        self.history.end(totals(version), complete)
        self.close()

    def close(self) -> None:
        self.metrics.close()
        folder.release(self.path)


def account(path: Path, *lines: dict[str, Any]) -> None:
    """Write accounts.jsonl."""
    (path / "accounts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def devices(seconds: dict[str, dict[str, float]]) -> dict[str, Any]:
    return {name: {"count": 1, "seconds": parts} for name, parts in seconds.items()}
