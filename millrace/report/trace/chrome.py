"""Events of a run as lines of a Chrome trace, which Perfetto opens.

| in a run | in Perfetto |
|---|---|
| a track | a process |
| spans of a track that overlap | lanes of the process: each one is a thread |
| a state | the lane `state` of its track |
| a sample | the lane of its slot, with a slice for each state |
| a cause | an arrow |

| arrow | from | to |
|---|---|---|
| sample | its slice `running` | each of its requests and scores |
| step | a local step | the slices `trained` of its samples; the last step of a version: its sync |
| version | its slice `activate` | its validation and its checkpoint |

A slice has its kind as category, and the kind and the key as name: `request` and `request 17/3`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from millrace.report.trace.arrows import SAMPLE, STEP, VERSION, arrow, number_of
from millrace.report.trace.choice import CALLS, ENDS, SAMPLES, STATES
from millrace.report.trace.facts import args_of, as_json, key_of
from millrace.report.trace.lanes import GAP, Lane, Lanes, Line
from millrace.waits.stream import Event

COUNTERS = (
    "reward/mean",
    "staleness/mean",
    "rollouter/tokens_per_s",
    "rollouter/idle_ratio",
    "trainer/idle_ratio",
)
"""The figures of a row that are drawn as curves."""

_STEPS = ("trainer", "train")
"""The track and the state of local steps."""
Args = Raw | None
_UNSHOWN = frozenset({"row", "stats"})
"""Events whose facts are large, and are not drawn as facts."""
_LONG_S = 1.0
"""A slice that is open for longer gets a line for its begin."""


class Translator:
    """Turns the events of one attempt into lines, in order."""

    def __init__(self, zero: float) -> None:
        self._zero = zero
        self._lanes = Lanes()
        self._begun: dict[tuple[str, str, str], list[Lane]] = {}
        self._states: dict[str, Lane] = {}
        self._slots: dict[str, Lane] = {}
        self._steps = 0
        self._sealed: int | None = None
        """The last step of the newest version that a sync sends."""
        self._step_from: float | None = None
        self._version = ""
        self._live = -1
        """The newest version that was made live."""

    def ts(self, time: float) -> float:
        """Return microseconds since the clock's zero."""
        return round((time - self._zero) * 1e6)

    def add(self, event: Event, out: list[Line]) -> None:
        """Append the lines of `event`."""
        time, track, name, phase, key, facts = event
        key, ts = key_of(key), self.ts(time)
        args = None if name in _UNSHOWN else args_of(facts)
        if phase == "begin":
            self._begin(track, name, key, ts, args, out)
        elif phase == "end":
            self._end((track, name, key), ts, args, out)
        elif track == SAMPLES:
            self._move(name, key, ts, args, out)
        elif phase == "state":
            self._state(track, name, ts, args, out)
        elif name == "stepped":
            self._step(ts, args, out)
        elif name == "row":
            self._count(track, facts.get("row", {}), ts, out)
        elif name == "gap":
            self.end_all(time, out, GAP)
            self._instant(track, name, key, ts, args, out)
        elif name != "stats":
            self._instant(track, name, key, ts, args, out)

    def end_all(self, time: float, out: list[Line], args: Raw) -> None:
        """End every slice. An end that comes later has no begin, and is ignored."""
        ts = self.ts(time)
        self._lanes.end_all(ts, out, args)
        self._begun.clear()
        self._states.clear()
        self._slots.clear()

    def write_begun(self, now: float, out: list[Line]) -> None:
        """Append the begins of the slices that have been open for a second: a kill must not lose them."""
        self._lanes.write_begun(self.ts(now - _LONG_S), out)

    def cut(self, time: float) -> tuple[list[Line], list[Line]]:
        """Return the end of one file and the head of the next one."""
        return self._lanes.cut(self.ts(time))

    def _begin(
        self, track: str, name: str, key: str, ts: float, args: Args, out: list[Line]
    ) -> None:
        if name in CALLS:
            lane, number = self._lanes.take(track, name, out), number_of(key)
            lead, led = None, None if number is None else arrow(SAMPLE, number)
        else:
            lane, (lead, led) = self._lanes.take(track, track, out), self._arrows(track, name, key)
        self._lanes.begin(lane, name, key, ts, args, lead, led)
        begun = (track, name, key)
        if (lanes := self._begun.get(begun)) is None:
            self._begun[begun] = [lane]
        else:
            lanes.append(lane)

    def _arrows(self, track: str, name: str, key: str) -> tuple[int | None, int | None]:
        """Return the arrow that begins at a span, and the one that ends there."""
        number = number_of(key)
        if track == "sync" and key != self._version:
            self._version, self._sealed = key, self._steps - 1 if self._steps else None
        if number is None:
            return None, None
        if name == "activate":  # A version that is sent again is made live again.
            again, self._live = number <= self._live, max(number, self._live)
            return None if again else arrow(VERSION, number), None
        if track in ("validation", "checkpoint"):
            return None, arrow(VERSION, number) if number else None
        if track == "sync" and self._sealed is not None:
            return None, arrow(STEP, self._sealed)
        return None, None

    def _end(self, begun: tuple[str, str, str], ts: float, args: Args, out: list[Line]) -> None:
        """End the oldest span of a track, name and key. Scores of one sample share a key."""
        if lanes := self._begun.get(begun):
            lane = lanes.pop(0)
            if not lanes:
                del self._begun[begun]
            self._lanes.end(lane, ts, out, args)
            self._lanes.free(lane)

    def _state(self, track: str, name: str, ts: float, args: Args, out: list[Line]) -> None:
        lane = self._states.get(track)
        if lane is None:
            lane = self._states[track] = self._lanes.take(track, "state", out)
        else:
            if (track, lane.line.cat) == _STEPS:
                self._step_from = lane.line.ts
            self._lanes.end(lane, ts, out)
        self._lanes.begin(lane, name, "", ts, args)

    def _move(self, name: str, key: str, ts: float, args: Args, out: list[Line]) -> None:
        """Move a sample to another state, or out of its slot."""
        lane = self._slots.get(key)
        if name in STATES:
            if lane is None:
                lane = self._slots[key] = self._lanes.take(SAMPLES, "slot", out)
            else:
                self._lanes.end(lane, ts, out)
            lead, led = None, None
            if name == "running" and (number := number_of(key)) is not None:
                lead = arrow(SAMPLE, number)
            elif name == "trained":  # the event of its step comes next
                led = arrow(STEP, self._steps)
            self._lanes.begin(lane, name, key, ts, args, lead, led)
            return
        if name == "dropped":
            self._instant(SAMPLES, name, key, ts, args, out)
        if name in ENDS and lane is not None:
            del self._slots[key]
            known = name == "retired" and self._version
            self._lanes.end(lane, ts, out, as_json({"version": self._version}) if known else None)
            self._lanes.free(lane)

    def _step(self, ts: float, args: Args, out: list[Line]) -> None:
        """Draw a local step, which has just ended. It began when the trainer began to train."""
        begin, self._step_from = ts if self._step_from is None else self._step_from, None
        leads, lane = arrow(STEP, self._steps), self._passing("trainer", "steps", out)
        name = f"step {self._steps}"
        out.append(
            Line(lane.pid, lane.tid, "X", begin, ts - begin, "step", name, args, leads, True)
        )
        self._steps += 1

    def _count(self, track: str, row: Mapping[str, Any], ts: float, out: list[Line]) -> None:
        lane = self._passing(track, "events", out)
        for name in COUNTERS:
            if name in row:
                args = as_json({"value": row[name]})
                out.append(Line(lane.pid, lane.tid, "C", ts, name=name, args=args))

    def _instant(
        self, track: str, name: str, key: str, ts: float, args: Args, out: list[Line]
    ) -> None:
        lane = self._passing(track, "events", out)
        shown = f"{name} {key}" if key else name
        out.append(Line(lane.pid, lane.tid, "i", ts, None, name, shown, args, s="t"))

    def _passing(self, track: str, group: str, out: list[Line]) -> Lane:
        """Return a lane for lines that leave no slice open."""
        lane = self._lanes.take(track, group, out)
        self._lanes.free(lane)
        return lane
