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

from msgspec import Raw

from millrace.report.trace.choice import CALLS, ENDS, SAMPLES, STATES
from millrace.report.trace.lanes import GAP, Lane, Lanes, Line, args_of, as_json, key_of
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
SAMPLE, STEP, VERSION = range(3)
"""The kinds of arrows. A cause and its effects have the same number."""
Args = Raw | None
_UNSHOWN = frozenset({"row", "stats"})
"""Events whose facts are large, and are not drawn as facts."""
_LONG_S = 1.0
"""A slice that is open for longer gets a line for its begin."""


def arrow(kind: int, number: int) -> int:
    """Return the number of an arrow. Perfetto wants whole numbers."""
    return 4 * number + kind


def number_of(key: str) -> int | None:
    """Return the number with which a key begins: 17 for `17/3`, None for `val/3`."""
    head = key.partition("/")[0]
    return int(head) if head.isdecimal() and len(head) < 16 else None


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

    def take(self) -> list[Line]:
        """Return the lines since the last call."""
        lines, self._lanes.lines = self._lanes.lines, []
        return lines

    def add(self, event: Event) -> None:
        """Add the lines of `event`."""
        time, track, name, phase, key, facts = event
        key, ts = key_of(key), self.ts(time)
        args = None if name in _UNSHOWN else args_of(facts)
        if phase == "begin":
            self._begin(track, name, key, ts, args)
        elif phase == "end":
            # The oldest span of these: scores of one sample share a key.
            if lanes := self._begun.get((track, name, key)):
                lane = lanes.pop(0)
                if not lanes:
                    del self._begun[track, name, key]
                self._lanes.end(lane, ts, args)
                self._lanes.free(lane)
        elif track == SAMPLES:
            self._move(name, key, ts, args)
        elif phase == "state":
            self._state(track, name, ts, args)
        elif name == "stepped":
            # It has just ended, and began when the trainer began to train.
            begin, self._step_from = ts if self._step_from is None else self._step_from, None
            lane, about = self._passing("trainer", "steps"), ("step", f"step {self._steps}", args)
            slice_ = lane.pid, lane.tid, "X", begin, ts - begin, *about
            self._lanes.lines.append(Line(*slice_, arrow(STEP, self._steps), True))
            self._steps += 1
        elif name == "row":
            row, lane = facts.get("row", {}), self._passing(track, "events")
            for name in COUNTERS:
                if name in row:
                    value = as_json({"value": row[name]})
                    self._lanes.lines.append(
                        Line(lane.pid, lane.tid, "C", ts, name=name, args=value)
                    )
        elif name != "stats":
            if name == "gap":
                self.end_all(time, GAP)
            self._instant(track, name, key, ts, args)

    def end_all(self, time: float, args: Raw) -> None:
        """End every slice. An end that comes later has no begin, and is ignored."""
        self._lanes.end_all(self.ts(time), args)
        self._begun.clear()
        self._states.clear()
        self._slots.clear()

    def write_begun(self, now: float) -> None:
        """Add the begins of the slices that have been open for a second: a kill must not lose them."""
        self._lanes.write_begun(self.ts(now - _LONG_S))

    def cut(self, time: float) -> list[Line]:
        """End one file, and return the head of the next one."""
        return self._lanes.cut(self.ts(time))

    def _begin(self, track: str, name: str, key: str, ts: float, args: Args) -> None:
        if name in CALLS:
            lane, number = self._lanes.take(track, name), number_of(key)
            lead, led = None, None if number is None else arrow(SAMPLE, number)
        else:
            lane, (lead, led) = self._lanes.take(track, track), self._arrows(track, name, key)
        self._lanes.begin(lane, name, key, ts, args, lead, led)
        self._begun.setdefault((track, name, key), []).append(lane)

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

    def _state(self, track: str, name: str, ts: float, args: Args) -> None:
        lane = self._states.get(track)
        if lane is None:
            lane = self._states[track] = self._lanes.take(track, "state")
        else:
            if (track, lane.line.cat) == _STEPS:
                self._step_from = lane.line.ts
            self._lanes.end(lane, ts)
        self._lanes.begin(lane, name, "", ts, args)

    def _move(self, name: str, key: str, ts: float, args: Args) -> None:
        """Move a sample to another state, or out of its slot."""
        lane = self._slots.get(key)
        if name in STATES:
            if lane is None:
                lane = self._slots[key] = self._lanes.take(SAMPLES, "slot")
            else:
                self._lanes.end(lane, ts)
            lead, led = None, None
            if name == "running" and (number := number_of(key)) is not None:
                lead = arrow(SAMPLE, number)
            elif name == "trained":  # the event of its step comes next
                led = arrow(STEP, self._steps)
            self._lanes.begin(lane, name, key, ts, args, lead, led)
            return
        if name == "dropped":
            self._instant(SAMPLES, name, key, ts, args)
        if name in ENDS and lane is not None:
            del self._slots[key]
            known = name == "retired" and self._version
            self._lanes.end(lane, ts, as_json({"version": self._version}) if known else None)
            self._lanes.free(lane)

    def _instant(self, track: str, name: str, key: str, ts: float, args: Args) -> None:
        lane, shown = self._passing(track, "events"), f"{name} {key}" if key else name
        line = Line(lane.pid, lane.tid, "i", ts, None, name, shown, args, s="t")
        self._lanes.lines.append(line)

    def _passing(self, track: str, group: str) -> Lane:
        """Return a lane for lines that leave no slice open."""
        lane = self._lanes.take(track, group)
        self._lanes.free(lane)
        return lane
