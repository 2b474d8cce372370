"""Requests to replicas and calls of the reward. They overlap, and are most events of a fast run.

Each call is drawn as a slice, unless there are too many. Then all calls of one sample in 2, 4, ... 64
are drawn, and those of the other samples are counted. Beside them, a track has one slice for each
time in which any call runs, drawn or not:

| slice | track | while there is |
|---|---|---|
| `generating` | a replica | a request of a training sample |
| `validating` | a replica | a request of a validation |
| `scoring` | `rewards` | a call of the reward |

Its fact `calls` counts the calls that began in it. `scoring` goes on over gaps of up to a millisecond.

The loop chooses, because an event that waits in a queue costs more than one that is counted at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from zlib import crc32

from millrace.observe.watch import Event
from millrace.report.accounts.tokens import VALIDATION

CALLS = frozenset({"request", "score"})
"""The names of calls."""
WORK = {"generating": False, "validating": True}
"""The slices of a replica, and whether they belong to a validation."""
SCORING = "scoring"
MOST_EVERY = 64
"""At least one sample in so many is drawn."""

_ALL = 2**32 - 1
"""The largest hash."""
_GAP_S = 0.001
"""Rewards of a fast run are computed in microseconds, with gaps that are as short."""


class _Work:
    """One kind of calls on one track."""

    __slots__ = ("calls", "kind", "open", "running", "track")

    def __init__(self, track: str, kind: str) -> None:
        self.track, self.kind = track, kind
        self.running, self.calls, self.open = 0, 0, False
        """`open` says whether the slice has begun, and not ended."""


class Calls:
    """Counts every call, and chooses those that are drawn.

    All of it runs on the event loop. `settle` also runs in the trace's thread: nothing may happen for
    long after a score.
    """

    def __init__(self, put: Callable[[Event], None]) -> None:
        """`put` gets the begins and the ends of the slices, as spans."""
        self.count = 0
        """All calls so far."""
        self.due = math.inf
        """Nothing is to be settled before this time."""
        self._least = _ALL
        """A sample is drawn if the hash of its number is not above this."""
        self._put = put
        self._works: dict[str, _Work] = {}
        self._drawn: dict[str, int] = {}
        """How many calls of a track and key run and are drawn. Scores of one sample share a key."""
        self._pauses: dict[str, tuple[float, int]] = {}
        """When the last score ended, while none runs, and the calls of the slice. Both threads use
        it. The one that pops it ends the slice or goes on."""

    def see(self, event: Event) -> bool:
        """Count the begin or the end of a call. Return whether it is drawn."""
        time, track, name, phase, key, _ = event
        call, place = f"{track} {key}", track
        if key.startswith(VALIDATION):
            key = key[len(VALIDATION) :]
            place = track if name == "score" else VALIDATION + track
        work, drawn = self._works.get(place), self._drawn
        if work is None:
            kind = SCORING if name == "score" else "generating" if place == track else "validating"
            work = self._works[place] = _Work(track, kind)
        if phase == "begin":
            if not work.running:
                self._begin(work, time)
            work.running += 1
            work.calls += 1
            self.count += 1
            # A remainder instead of a hash would be biased if every second row is easy.
            if crc32(key.partition("/")[0].encode("utf-8", "replace")) > self._least:
                return False
            drawn[call] = drawn.get(call, 0) + 1
            return True
        if work.running > 1:
            work.running -= 1
        elif work.running:
            work.running = 0
            self._end(work, time)
        if call not in drawn:
            return False
        drawn[call] -= 1
        if not drawn[call]:
            del drawn[call]
        return True

    def draw(self, every: int) -> None:
        """Draw the calls of one sample in `every` from now on. Fewer are some of those before."""
        self._least = _ALL // every

    def settle(self, now: float) -> None:
        """End the slices whose last call ended over a millisecond before `now`."""
        self.due = math.inf
        for track, (ended, _) in self._pauses.copy().items():
            if now - ended <= _GAP_S:
                self.due = min(self.due, ended + _GAP_S)
            elif pause := self._pauses.pop(track, None):
                self._put(_end_of(track, SCORING, *pause))

    def begun(self, time: float) -> list[Event]:
        """Return new begins of the slices that have begun: the trace lost some events until `time`."""
        self._pauses.clear()
        works = [work for work in list(self._works.values()) if work.open]
        return [Event(time, work.track, work.kind, "begin") for work in works]

    def close(self, time: float) -> None:
        """End every slice at the end of the trace."""
        self.settle(math.inf)
        for work in list(self._works.values()):
            if work.open:
                self._put(_end_of(work.track, work.kind, time, work.calls, open=True))

    def _begin(self, work: _Work, time: float) -> None:
        """Begin a slice, or go on with the one before a short gap."""
        if work.kind == SCORING and (pause := self._pauses.pop(work.track, None)):
            if time - pause[0] <= _GAP_S:
                work.open = True
                return
            self._put(_end_of(work.track, SCORING, *pause))
        work.calls = 0
        self._put(Event(time, work.track, work.kind, "begin"))
        work.open = True

    def _end(self, work: _Work, time: float) -> None:
        work.open = False
        if work.kind == SCORING:
            self._pauses[work.track] = time, work.calls
            self.due = min(self.due, time + _GAP_S)
        else:
            self._put(_end_of(work.track, work.kind, time, work.calls))


def _end_of(track: str, kind: str, time: float, calls: int, **facts: bool) -> Event:
    return Event(time, track, kind, "end", "", {"calls": calls, **facts})
