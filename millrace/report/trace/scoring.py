"""The times in which any call of the reward runs, as slices `scoring` of the track `rewards`.

The report needs them all: the trainer waits for rewards if nothing is drawn meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from millrace.waits.stream import Event

REWARDS, SCORING = "rewards", "scoring"
_GAP_S = 0.001
"""Rewards of a fast run are computed in microseconds, with gaps that are as short. A slice goes on
over such a gap."""


class Scoring:
    """Counts the calls of the reward that run.

    All of it runs on the event loop. `settle` also runs in the trace's thread: nothing may happen for
    long after a call.
    """

    def __init__(self, put: Callable[[Event], None]) -> None:
        """`put` gets the begins and the ends of the slices."""
        self.due = math.inf
        """Nothing is to be settled before this time."""
        self._put = put
        self._running, self._open = 0, False
        """`_open` says whether a call runs whose slice has begun."""
        self._paused: list[float] = []
        """When the last call ended, while none runs. Both threads use it. The one that pops it ends
        the slice or goes on."""

    def see(self, phase: str, time: float) -> None:
        """Count the begin or the end of a call."""
        if phase == "begin":
            if not self._running:
                self._begin(time)
            self._running += 1
        elif self._running > 1:
            self._running -= 1
        elif self._running:
            self._running, self._open = 0, False
            self._paused.append(time)
            self.due = time + _GAP_S

    def settle(self, now: float) -> None:
        """End the slice whose last call ended over a millisecond before `now`."""
        self.due = math.inf
        for ended in self._paused[:]:
            if now - ended <= _GAP_S:
                self.due = ended + _GAP_S
            elif (pause := self._pop()) is not None:
                self._put(Event(pause, REWARDS, SCORING, "end"))

    def begun(self, time: float) -> list[Event]:
        """Return the begin of the slice that has begun: the trace lost some events until `time`."""
        self._paused.clear()
        return [Event(time, REWARDS, SCORING, "begin")] if self._open else []

    def close(self, time: float) -> None:
        """End the slice at the end of the trace."""
        self.settle(math.inf)
        if self._open:
            self._put(Event(time, REWARDS, SCORING, "end", "", {"open": True}))

    def _begin(self, time: float) -> None:
        """Begin a slice, or go on with the one before a short gap."""
        pause = self._pop()
        if pause is None or time - pause > _GAP_S:
            if pause is not None:
                self._put(Event(pause, REWARDS, SCORING, "end"))
            self._put(Event(time, REWARDS, SCORING, "begin"))
        self._open = True

    def _pop(self) -> float | None:
        try:
            return self._paused.pop()
        except IndexError:
            return None
