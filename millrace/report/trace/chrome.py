"""Events of a run as lines of a Chrome trace, which Perfetto opens.

| in a run | in Perfetto |
|---|---|
| a track | a process |
| spans of a track that overlap | lanes of the process: each one is a thread |
| a sample | the lane of its slot, with a slice for each state |
| a cause | an arrow |

| arrow | from | to |
|---|---|---|
| sample | its slice `running` | each of its requests and scores |
| step | a local step | the slices `trained` of its samples, and the sync that sends it |
| version | its slice `activate` | its validation and its checkpoint |

A slice has its kind as category, and the kind and the key as name: `request` and `request 17/3`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from millrace.codec import sendable
from millrace.observe.watch import Event
from millrace.report.trace.lanes import GAP, Lane, Lanes, Line, as_json

SAMPLES = "samples"
STATES = frozenset({"waiting", "running", "ready", "taken", "trained", "sealed"})
COUNTERS = (
    "reward/mean",
    "staleness/mean",
    "rollouter/tokens_per_s",
    "rollouter/idle_ratio",
    "trainer/idle_ratio",
)
"""The figures of a row that are drawn as curves."""

_OVERLAPPING = frozenset({"request", "score"})
"""Spans that overlap by nature. They have lanes of their own."""
_STEPS = ("trainer", "train")
"""The track and the state of local steps."""
Args = Raw | None
_SAMPLE, _STEP, _VERSION = range(3)
_UNSHOWN = frozenset({"row", "stats"})
"""Events whose facts are large, and are not drawn as facts."""
_MOST_ITEMS, _MOST_TEXT, _MOST_KEY = 1024, 500, 100
_MOST_JSON = 500
"""Bytes of facts that go into the trace as they are. Larger ones are shortened."""
_AS_ZERO, _LARGE = bytes.maketrans(b"123456789", b"000000000"), b"0" * 19
"""So many digits may be a whole number of more than 64 bits. Readers of JSON refuse or round it."""


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
        """The last step of the newest sealed version."""
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
        if len(key) > _MOST_KEY or not key.isascii():
            key = sendable(key[:_MOST_TEXT])
        ts = round((time - self._zero) * 1e6)
        args = _args_of(facts) if facts and name not in _UNSHOWN else None
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
            self.end_all(ts, out, GAP)
            self._instant(track, name, key, ts, args, out)
        elif name != "stats":
            self._instant(track, name, key, ts, args, out)

    def end_all(self, ts: float, out: list[Line], args: Raw) -> None:
        """End every slice. An end that comes later has no begin, and is ignored."""
        self._lanes.end_all(ts, out, args)
        self._begun.clear()
        self._states.clear()
        self._slots.clear()

    def write_begun(self, before: float, out: list[Line]) -> None:
        """Append the begins of the open slices that began before `before`."""
        self._lanes.write_begun(before, out)

    def cut(self, ts: float) -> tuple[list[Line], list[Line]]:
        """Return the end of one file and the head of the next one."""
        return self._lanes.cut(ts)

    def _begin(
        self, track: str, name: str, key: str, ts: float, args: Args, out: list[Line]
    ) -> None:
        if name in _OVERLAPPING:
            lane, number = self._lanes.take(track, name, out), _number(key)
            lead, led = None, None if number is None else _arrow(_SAMPLE, number)
        else:
            lane, (lead, led) = self._lanes.take(track, track, out), self._arrows(track, name, key)
        self._lanes.begin(lane, name, key, ts, args, lead, led)
        begun = (track, name, key)
        if (lanes := self._begun.get(begun)) is None:
            self._begun[begun] = [lane]
        else:
            lanes.append(lane)
        if track == "sync":
            self._version = key

    def _arrows(self, track: str, name: str, key: str) -> tuple[int | None, int | None]:
        """Return the arrow that begins at a span, and the one that ends there."""
        number = _number(key)
        if number is None:
            return None, None
        if name == "activate":  # A version that is sent again is made live again.
            again, self._live = number <= self._live, max(number, self._live)
            return None if again else _arrow(_VERSION, number), None
        if track in ("validation", "checkpoint"):
            return None, _arrow(_VERSION, number) if number else None
        if track == "sync" and self._sealed is not None:
            return None, _arrow(_STEP, self._sealed)
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
            if name == "running" and (number := _number(key)) is not None:
                lead = _arrow(_SAMPLE, number)
            elif name == "trained":  # the event of its step comes next
                led = _arrow(_STEP, self._steps)
            elif name == "sealed":
                self._sealed = self._steps - 1 if self._steps else None
            self._lanes.begin(lane, name, key, ts, args, lead, led)
            return
        if name == "dropped":
            self._instant(SAMPLES, name, key, ts, args, out)
        if name in ("retired", "dropped") and lane is not None:
            del self._slots[key]
            known = name == "retired" and self._version
            self._lanes.end(lane, ts, out, as_json({"version": self._version}) if known else None)
            self._lanes.free(lane)

    def _step(self, ts: float, args: Args, out: list[Line]) -> None:
        """Draw a local step, which has just ended. It began when the trainer began to train."""
        begin, self._step_from = ts if self._step_from is None else self._step_from, None
        arrow, lane = _arrow(_STEP, self._steps), self._passing("trainer", "steps", out)
        name = f"step {self._steps}"
        out.append(
            Line(lane.pid, lane.tid, "X", begin, ts - begin, "step", name, args, arrow, True)
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


def _arrow(kind: int, number: int) -> int:
    """Return the number of an arrow. Perfetto wants whole numbers."""
    return 4 * number + kind


def _number(key: str) -> int | None:
    """Return the number with which a key begins: 17 for `17/3`, None for `val/3`."""
    head = key.partition("/")[0]
    return int(head) if head.isdecimal() and len(head) < 16 else None


def _args_of(facts: Mapping[str, Any]) -> Args:
    """Return the facts as JSON, without those that a trace cannot hold."""
    try:
        data = msgspec.json.encode(facts)
    except (TypeError, ValueError, OverflowError, RecursionError):
        data = b""
    if 0 < len(data) < _MOST_JSON and _LARGE not in data.translate(_AS_ZERO):
        return Raw(data)
    found = plain(facts)
    return as_json(found) if found else None


def plain(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the facts that a trace can hold: numbers, short texts, short lists."""
    if not facts:
        return None
    args = {}
    for name, value in facts.items():
        small = type(value) is int and -(2**63) <= value < 2**63
        known = value if small else _plain(value)
        if known is not None:
            args[sendable(str(name))] = known
    return args or None


def _plain(value: Any, depth: int = 0) -> Any:
    """Return `value` as plain data, or None if it is an object of the run."""
    kind = type(value)
    if kind is int:
        if -(2**63) <= value < 2**63:
            return value
        return str(value) if value.bit_length() < _MOST_TEXT else hex(value)[:_MOST_TEXT]
    if kind is bool or kind is float:
        return value
    if isinstance(value, str):
        short = value[:_MOST_TEXT]
        return short if short.isascii() else sendable(short)
    if depth < 3 and kind in (list, tuple):
        return [
            item if type(item) is int and -(2**63) <= item < 2**63 else _plain(item, depth + 1)
            for item in (value if len(value) <= _MOST_ITEMS else value[:_MOST_ITEMS])
        ]
    if depth < 3 and kind is dict:
        items = list(value.items())[:_MOST_ITEMS]
        return {sendable(str(name)): _plain(item, depth + 1) for name, item in items}
    return None
