"""Alarms for a disk that refuses to write, such as a full one. The run goes on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millrace.errors import DiskError
from millrace.observe.progress import Progress
from millrace.waits.registry import at


class DiskAlarm:
    """Says once that a file is refused, and once that the disk takes it again."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._refused: set[str] = set()
        self.checkpoints = 0
        """The checkpoints that were refused."""

    def refused(self, what: str, error: Exception) -> None:
        if what not in self._refused:
            self._refused.add(what)
            text = f"the disk refuses {what}. The run goes on, and tries again later. {error}"
            self._progress.note(f"alarm: {text}")
            at("run", "alarm_began", f"disk: {what}", text=text)

    def taken(self, what: str) -> None:
        if what in self._refused:
            self._refused.remove(what)
            self._progress.note(f"alarm over: the disk takes {what} again")
            at("run", "alarm_ended", f"disk: {what}")

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Let the body write `what`."""
        try:
            yield
        except (DiskError, OSError) as error:
            self.refused(what, error)
        else:
            self.taken(what)
