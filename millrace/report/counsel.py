"""The advice in a live view: the same sentences as in the report, computed seldom."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from millrace.report.look import Look


class Counsel:
    """The advice on a run, computed again only when it has new versions, and seldom."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._about: tuple[int, int, str] | None = None
        self._due, self._said = 0.0, list[str]()

    def on(self, look: Look) -> list[str]:
        """Return the sentences on the run as it is now."""
        about, begin = (look.attempt, look.version, look.state), self._clock()
        if about != self._about and (look.ended or begin >= self._due):
            self._said, self._about = advice(self._folder), about
            self._due = begin + max(10.0, 20 * (self._clock() - begin))
        return self._said


def advice(folder: Path) -> list[str]:
    """Return the sentences of report/advice.py. Only this function calls it for live views."""
    return []
