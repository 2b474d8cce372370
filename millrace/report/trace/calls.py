"""Requests to replicas and calls of the reward. They overlap, and are most events of a fast run.

Each call is a slice, unless there are too many to draw. Then all calls of every second, fourth, ...
sample are drawn, and those of the other samples are counted. Beside them, a track has one slice for
each time in which any call runs, drawn or not:

| slice | track | while there is |
|---|---|---|
| `generating` | a replica | a request of a training sample |
| `validating` | a replica | a request of a validation |
| `scoring` | `rewards` | a call of the reward |

Its fact `calls` counts the calls that began in it. `scoring` goes on over gaps of up to a millisecond.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from msgspec import Raw

from millrace.observe.watch import Event
from millrace.report.accounts.tokens import VALIDATION
from millrace.report.trace.arrows import SAMPLE, arrow, number_of
from millrace.report.trace.facts import args_of, as_json, key_of
from millrace.report.trace.lanes import Lane, Lanes, Line, both

CALLS = frozenset({"request", "score"})
"""The names of calls."""
WORK = {"generating": False, "validating": True}
"""The slices of a replica, and whether they belong to a validation."""
SCORING = "scoring"
MOST_EVERY = 64
"""At least one sample of so many is drawn."""

_GAP_S = 0.001
"""Rewards of a fast run are computed in microseconds, with gaps that are as short."""
_MIX, _MASK = 0x9E3779B1, 2**32 - 1
"""Knuth's multiplicative hash. A remainder would be biased if every second row is easy."""


class _Work:
    """The slice of one kind of calls on one track."""

    __slots__ = ("calls", "ended", "gap_s", "kind", "lane", "running", "track")

    def __init__(self, track: str, kind: str) -> None:
        self.track, self.kind = track, kind
        self.gap_s = _GAP_S if kind == SCORING else 0.0
        self.running, self.calls = 0, 0
        self.lane: Lane | None = None
        """The lane, until the end of the slice is drawn."""
        self.ended = 0.0
        """When the last call ended. It counts if none runs."""


class Calls:
    """Draws the calls of all tracks."""

    def __init__(self, lanes: Lanes, ts: Callable[[float], float]) -> None:
        """`ts` returns the microseconds in the file of a time of the clock."""
        self.count = 0
        """All calls so far."""
        self.every = 1
        """The calls of one sample of so many are drawn. A power of two.

        If it changes while several scores of one sample run, their ends may be swapped.
        """
        self._lanes, self._ts = lanes, ts
        self._drawn: dict[tuple[str, str], list[Lane]] = {}
        """The lanes of the calls that run and are drawn, by track and key."""
        self._works: dict[str, _Work] = {}
        self._known: Counter[tuple[str, str]] | None = None
        """After a gap of the trace: the calls that run and began after it. Ends of others are ignored.

        Without a gap every end has its begin, and nothing needs to be looked up.
        """

    def draw(self, events: Iterable[Event], out: list[Line]) -> Iterator[Event]:
        """Draw or count the calls among `events`. Yield the other events.

        It is one long loop because a fast run has 20,000 events in a second.
        """
        works, drawn = self._works, self._drawn
        for event in events:
            time, track, name, phase, key, _ = event
            if name not in CALLS:
                yield event
                continue
            validates = name == "request" and key.startswith(VALIDATION)
            place = VALIDATION + track if validates else track
            if (work := works.get(place)) is None:
                kind = SCORING if name == "score" else "validating" if validates else "generating"
                work = works[place] = _Work(track, kind)
            if phase == "begin":
                if not work.running and (work.lane is None or time - work.ended > work.gap_s):
                    self._start(work, time, out)
                self.count += 1
                work.running += 1
                work.calls += 1
                if self._known is not None:
                    self._known[track, key] += 1
                if self.every == 1 or self._chosen(key):
                    self._begin(event, out)
            else:
                if self._known is not None and not _began(self._known, track, key):
                    continue
                if (track, key) in drawn:
                    self._end(event, out)
                work.running -= 1
                if not work.running:
                    work.ended = time

    def _chosen(self, key: str) -> bool:
        """Return whether the calls of a sample are drawn."""
        head, _, tail = key.partition("/")
        if not head.isdecimal():
            head = tail.partition("/")[0]
        return not head.isdecimal() or int(head[-15:]) * _MIX & _MASK <= _MASK // self.every

    def _begin(self, event: Event, out: list[Line]) -> None:
        lane, number = self._lanes.take(event.track, event.name, out), number_of(event.key)
        led = None if number is None else arrow(SAMPLE, number)
        args, ts = args_of(event.facts), self._ts(event.time)
        self._lanes.begin(lane, event.name, key_of(event.key), ts, args, None, led)
        self._drawn.setdefault((event.track, event.key), []).append(lane)

    def _end(self, event: Event, out: list[Line]) -> None:
        """End the oldest call of a track and key. Scores of one sample share a key."""
        lanes = self._drawn[event.track, event.key]
        lane = lanes.pop(0)
        if not lanes:
            del self._drawn[event.track, event.key]
        self._lanes.end(lane, self._ts(event.time), out, args_of(event.facts))
        self._lanes.free(lane)

    def settle(self, now: float, out: list[Line]) -> None:
        """End the slices whose calls ended long enough before `now`, in seconds of the clock."""
        for work in self._works.values():
            if not work.running and now - work.ended > work.gap_s:
                self._stop(work, out)

    def end_all(self, time: float, out: list[Line], why: Raw) -> None:
        """End every slice, and forget every call. Ends of these calls may still come."""
        for work in self._works.values():
            if work.running:
                work.ended = time
                self._stop(work, out, why)
        self.settle(math.inf, out)
        self._drawn.clear()
        self._works.clear()
        self._known = Counter()

    def _start(self, work: _Work, time: float, out: list[Line]) -> None:
        self._stop(work, out)
        work.calls, work.lane = 0, self._lanes.take(work.track, "busy", out)
        self._lanes.begin(work.lane, work.kind, "", self._ts(time))

    def _stop(self, work: _Work, out: list[Line], why: Raw | None = None) -> None:
        if work.lane is not None:
            args = as_json({"calls": work.calls})
            args = args if why is None else both(args, why)
            self._lanes.end(work.lane, self._ts(work.ended), out, args)
            self._lanes.free(work.lane)
            work.lane = None


def _began(known: Counter[tuple[str, str]], track: str, key: str) -> bool:
    """Return whether a call that ends is known, and count its end."""
    left = known.pop((track, key), 0) - 1
    if left > 0:
        known[track, key] = left
    return left >= 0
