"""Wall time of one task, divided so that the parts add up to the whole: whatever is not named is `other`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Parts = Callable[[str], AbstractContextManager[None]]
"""`Stopwatch.part`, or `untimed`."""


def untimed(name: str) -> AbstractContextManager[None]:
    """Leave the body's seconds to whichever part is running."""
    return nullcontext()


class Stopwatch:
    """Exactly one name runs at a time; entering another one suspends it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._name = "other"
        self._since = clock()
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Attribute the body's seconds to `name`."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def running(self) -> dict[str, float]:
        """Seconds of each part so far in this period."""
        self._switch(self._name)
        return dict(self._parts)

    def flush(self) -> dict[str, float]:
        """Seconds of each part since the last flush; their sum is the wall time between the two."""
        parts = self.running()
        self._parts = {}
        return parts

    def _switch(self, name: str) -> str:
        now = self._clock()
        self._parts[self._name] = self._parts.get(self._name, 0.0) + now - self._since
        previous, self._name, self._since = self._name, name, now
        return previous
