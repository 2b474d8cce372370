"""The states of sessions: drawing, at the closed gate, or waiting for a tool or the environment."""

from __future__ import annotations

from collections.abc import Callable


class Occupancy:
    """The number of sessions in each state, on average since the last row."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._live = self._drawing = self._gate = 0
        self._sums = [0.0, 0.0, 0.0]
        """Session-seconds: at an engine, at the gate, elsewhere."""
        self._begin: float | None = None
        """The last row, or the first change. None before it."""
        self._since = 0.0

    def change(self, *, live: int = 0, drawing: int = 0, gate: int = 0) -> None:
        """Add to the numbers of live sessions, of draws at an engine, and of draws at the gate."""
        self._tick()
        self._live += live
        self._drawing += drawing
        self._gate += gate

    def row(self) -> dict[str, float]:
        """Return the averages since the last call."""
        self._tick()
        seconds, sums = self._since - (self._begin or 0.0), self._sums
        self._begin, self._sums = self._since, [0.0, 0.0, 0.0]
        names = ("drawing", "at_gate", "waiting")
        return {
            f"agents/{name}": total / seconds if seconds else 0.0
            for name, total in zip(names, sums, strict=True)
        }

    def _tick(self) -> None:
        now = self._now()
        if self._begin is None:
            self._begin = self._since = now
        # Threads of one session may draw at the same time.
        waiting = max(0, self._live - self._drawing - self._gate)
        for i, number in enumerate((self._drawing, self._gate, waiting)):
            self._sums[i] += number * (now - self._since)
        self._since = now


class NullOccupancy(Occupancy):
    """Counts nothing, for single responses: their sessions always draw or wait at the gate."""

    def change(self, *, live: int = 0, drawing: int = 0, gate: int = 0) -> None:
        return None

    def row(self) -> dict[str, float]:
        return {}
