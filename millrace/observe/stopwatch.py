"""Wall time of one task, by part. The parts add up to the whole; unnamed time is `other`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from millrace.observe.watch import UNWATCHED, Watch

Timer = Callable[[str], AbstractContextManager[None]]
"""`Stopwatch.part`, or `no_timer`."""


def no_timer(name: str) -> AbstractContextManager[None]:
    """Count the body's seconds for the part that is already running."""
    return nullcontext()


class Stopwatch:
    """A stopwatch in which one part runs at a time. Another part suspends it."""

    def __init__(
        self, clock: Callable[[], float], watch: Watch = UNWATCHED, track: str = ""
    ) -> None:
        """`watch` sees each part as a state of `track`."""
        self._clock, self._watch, self._track = clock, watch, track
        self._name = "other"
        self._since = clock()
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the body's seconds for `name`."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count `seconds` of this period's `source` for `target` instead.

        This is for a part whose name is known only at its end.
        """
        moved = min(seconds, self._parts.get(source, 0.0))
        if moved > 0:
            self._parts[source] -= moved
            self._parts[target] = self._parts.get(target, 0.0) + moved
            self._watch.at(self._track, "relabelled", seconds=moved, source=source, target=target)

    def running(self) -> dict[str, float]:
        """Return the seconds of each part so far in this period."""
        self._switch(self._name)
        return dict(self._parts)

    def flush(self) -> dict[str, float]:
        """Return the seconds of each part since the last flush, and start a new period."""
        parts = self.running()
        self._parts = {}
        return parts

    def _switch(self, name: str) -> str:
        now = self._clock()
        self._parts[self._name] = self._parts.get(self._name, 0.0) + now - self._since
        previous, self._name, self._since = self._name, name, now
        if name != previous:
            self._watch.state(self._track, name)
        return previous
