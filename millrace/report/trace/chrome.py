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

import heapq
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from millrace.codec import sendable
from millrace.waits.registry import Event

SAMPLES = "samples"
"""The track of samples."""
STATES = frozenset({"waiting", "running", "ready", "taken", "trained", "sealed"})
ENDS = frozenset({"retired", "dropped"})
CALLS = frozenset({"request", "score", "log_probs"})
"""The names of requests to replicas, and of calls of the reward and of teachers."""
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
Arrows = tuple[int | None, int | None]
"""The arrow that begins at a slice, and the one that ends there. At most one of them is given."""
_NONE: Arrows = None, None
_UNSHOWN = frozenset({"row", "stats"})
"""Events whose facts are large, and are not drawn as facts."""
_LONG_S = 1.0
"""A slice that is open for longer gets a line for its begin."""
ORDER = (
    "run",
    "trainer",
    "sync",
    "validation",
    "checkpoint",
    "rollouts",
    "rollout-",
    "rewards",
    "teachers",
)
"""The order of the processes. Other tracks come last."""
_MOST_ITEMS, _MOST_TEXT, _MOST_KEY = 1024, 500, 100
_MOST_JSON = 500
"""Bytes of facts that go into the trace as they are. Larger ones are shortened."""
_AS_ZERO, _LARGE = bytes.maketrans(b"123456789", b"000000000"), b"0" * 19
"""So many digits may be a whole number of more than 64 bits. Readers of JSON refuse or round it."""
_FIRST_TID = 1000
"""No thread may have the number of a process: it would be that process's main thread."""


def arrow(kind: int, number: int) -> int:
    """Return the number of an arrow. Perfetto wants whole numbers."""
    return 4 * number + kind


def number_of(key: str) -> int | None:
    """Return the number with which a key begins: 17 for `17/3`, None for `val/3`."""
    head = key.partition("/")[0]
    return int(head) if head.isdecimal() and len(head) < 16 else None


def as_json(args: dict[str, Any]) -> Raw:
    return Raw(msgspec.json.encode(args))


def key_of(key: str) -> str:
    """Return a key that a trace can hold."""
    return key if len(key) <= _MOST_KEY and key.isascii() else sendable(key[:_MOST_TEXT])


def args_of(facts: Mapping[str, Any]) -> Raw | None:
    """Return the facts as JSON, without those that a trace cannot hold."""
    if not facts:
        return None
    try:
        data = msgspec.json.encode(facts)
    except (TypeError, ValueError, OverflowError, RecursionError):
        data = b""
    if 0 < len(data) < _MOST_JSON and _LARGE not in data.translate(_AS_ZERO):
        return Raw(data)
    shown = {sendable(str(name)): _plain(value) for name, value in facts.items()}
    shown = {name: value for name, value in shown.items() if value is not None}
    return as_json(shown) if shown else None


def _plain(value: Any, depth: int = 0) -> Any:
    """Return numbers, short texts and short lists, or None if it is an object of the run."""
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


OPEN, GAP, CONTINUES, CONTINUED = (
    as_json({word: True}) for word in ("open", "gap", "continues", "continued")
)
"""Why a slice ends without its end, and how it goes on in the next file."""


class Line(msgspec.Struct, omit_defaults=True, gc=False):
    """One line of a trace."""

    pid: int
    tid: int
    ph: str
    ts: float
    """Microseconds since the clock's zero."""
    dur: float | None = None
    cat: str = ""
    name: str = ""
    args: Raw | None = None
    bind_id: int | None = None
    """The arrow that begins here (`flow_out`) or ends here (`flow_in`)."""
    flow_out: bool = False
    flow_in: bool = False
    s: str = ""


class Lane:
    """A thread of a track. It has one slice at a time."""

    __slots__ = ("free", "line", "pid", "tid", "written")

    def __init__(self, pid: int, tid: int, free: list[Lane]) -> None:
        self.pid, self.tid = pid, tid
        self.free = free
        """A heap of the free lanes of its group."""
        self.line = Line(pid, tid, "X", 0.0)
        """The newest slice, from its begin on. A short slice is this one line."""
        self.written = False
        """Whether a line of its begin is in the file already."""

    def __lt__(self, other: Lane) -> bool:
        return self.tid < other.tid


class Translator:
    """Turns the events of one attempt into lines, in order.

    A free lane is taken again, the first one of its group first.
    """

    def __init__(self, zero: float) -> None:
        self._zero = zero
        self._lines: list[Line] = []
        """The lines that nobody took yet."""
        self._names: list[Line] = []
        """The names of all lanes and tracks so far. Each file has them."""
        self._open: dict[int, Lane] = {}
        """The lanes that have a slice, by thread."""
        self._pids: dict[str, int] = {}
        self._groups: dict[tuple[str, str], tuple[list[Lane], list[Lane]]] = {}
        """All lanes and the free ones of each group of a track."""
        self._cut = 0.0
        """When the file began."""
        self._begun: dict[tuple[str, str, str], list[Lane]] = {}
        self._states: dict[tuple[str, str], Lane] = {}
        """The lane of each track that has states, and of each sample in a slot."""
        self._steps = 0
        self._sealed: int | None = None
        """The last step of the newest version that a sync sends."""
        self._step_from: float | None = None
        self._version = ""
        self._live = -1
        """The newest version that was made live."""

    def take(self) -> list[Line]:
        """Return the lines since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def add(self, event: Event) -> None:
        """Add the lines of `event`."""
        time, track, name, phase, key, facts = event
        key, ts = key_of(key), self._ts(time)
        args = None if name in _UNSHOWN else args_of(facts)
        if phase == "begin":
            group = name if name in CALLS else track
            lane = self._take(track, group)
            self._begin(lane, name, key, ts, args, self._arrows(track, name, key))
            self._begun.setdefault((track, name, key), []).append(lane)
        elif phase == "end":
            # The oldest span of these: scores of one sample share a key.
            if lanes := self._begun.get((track, name, key)):
                lane = lanes.pop(0)
                if not lanes:
                    del self._begun[track, name, key]
                self._end(lane, ts, args)
                self._free(lane)
        elif track == SAMPLES:
            self._move(name, key, ts, args)
        elif phase == "state":
            lane_ = self._states.get((track, ""))
            if lane_ is not None and (track, lane_.line.cat) == _STEPS:
                self._step_from = lane_.line.ts
            self._switch(track, "", name, ts, args)
        elif name == "stepped":
            # It has just ended, and began when the trainer began to train.
            begin, self._step_from = ts if self._step_from is None else self._step_from, None
            lane, about = self._passing("trainer", "steps"), ("step", f"step {self._steps}", args)
            slice_ = lane.pid, lane.tid, "X", begin, ts - begin, *about
            self._lines.append(Line(*slice_, arrow(STEP, self._steps), True))
            self._steps += 1
        elif name == "row":
            row, lane = facts.get("row", {}), self._passing(track, "events")
            for name in COUNTERS:
                if name in row:
                    value = as_json({"value": row[name]})
                    self._lines.append(Line(lane.pid, lane.tid, "C", ts, name=name, args=value))
        elif name != "stats":
            if name == "gap":
                self.end_all(time, GAP)
            self._instant(track, name, key, ts, args)

    def end_all(self, time: float, args: Raw) -> None:
        """End every slice. An end that comes later has no begin, and is ignored."""
        for lane in list(self._open.values()):
            self._end(lane, self._ts(time), args)
            self._free(lane)
        self._begun.clear()
        self._states.clear()

    def write_begun(self, now: float) -> None:
        """Add the begins of the slices that have been open for a second: a kill must not lose them."""
        self._write_begun(self._ts(now - _LONG_S))

    def cut(self, time: float) -> list[Line]:
        """End one file, and return the head of the next one. Open slices are in both."""
        self._cut = ts = self._ts(time)
        heads = list(self._names)
        self._write_begun(ts + 1)
        for lane in self._open.values():
            self._lines.append(Line(lane.pid, lane.tid, "E", ts, args=CONTINUES))
            out = lane.line.bind_id if lane.line.flow_out else None
            begin = lane.pid, lane.tid, "B", ts, None, lane.line.cat, lane.line.name
            heads.append(Line(*begin, CONTINUED, out, out is not None))
        return heads

    def _ts(self, time: float) -> float:
        """Return microseconds since the clock's zero."""
        return round((time - self._zero) * 1e6)

    def _arrows(self, track: str, name: str, key: str) -> Arrows:
        number = number_of(key)
        if name in CALLS:
            return None, None if number is None else arrow(SAMPLE, number)
        if track == "sync" and key != self._version:
            self._version, self._sealed = key, self._steps - 1 if self._steps else None
        if number is None:
            return _NONE
        if name == "activate":  # A version that is sent again is made live again.
            again, self._live = number <= self._live, max(number, self._live)
            return None if again else arrow(VERSION, number), None
        if track in ("validation", "checkpoint"):
            return None, arrow(VERSION, number) if number else None
        if track == "sync" and self._sealed is not None:
            return None, arrow(STEP, self._sealed)
        return _NONE

    def _move(self, name: str, key: str, ts: float, args: Raw | None) -> None:
        """Move a sample to another state, or out of its slot."""
        if name in STATES:
            arrows = _NONE
            if name == "running" and (number := number_of(key)) is not None:
                arrows = arrow(SAMPLE, number), None
            elif name == "trained":  # the event of its step comes next
                arrows = None, arrow(STEP, self._steps)
            self._switch(SAMPLES, key, name, ts, args, arrows)
            return
        if name == "dropped":
            self._instant(SAMPLES, name, key, ts, args)
        if name in ENDS and (lane := self._states.pop((SAMPLES, key), None)) is not None:
            known = name == "retired" and self._version
            self._end(lane, ts, as_json({"version": self._version}) if known else None)
            self._free(lane)

    def _switch(
        self, track: str, key: str, state: str, ts: float, args: Raw | None, arrows: Arrows = _NONE
    ) -> None:
        """End the state of a track or a sample, and begin another one in the same lane."""
        lane = self._states.get((track, key))
        if lane is None:
            lane = self._states[track, key] = self._take(track, "slot" if key else "state")
        else:
            self._end(lane, ts)
        self._begin(lane, state, key, ts, args, arrows)

    def _instant(self, track: str, name: str, key: str, ts: float, args: Raw | None) -> None:
        lane, shown = self._passing(track, "events"), f"{name} {key}" if key else name
        line = Line(lane.pid, lane.tid, "i", ts, None, name, shown, args, s="t")
        self._lines.append(line)

    def _passing(self, track: str, group: str) -> Lane:
        """Return a lane for lines that leave no slice open."""
        lane = self._take(track, group)
        self._free(lane)
        return lane

    def _take(self, track: str, group: str) -> Lane:
        """Return a free lane."""
        lanes, free = self._groups.setdefault((track, group), ([], []))
        if free:
            return heapq.heappop(free)
        pid = self._pids.get(track)
        if pid is None:
            pid = self._pids[track] = len(self._pids) + 1
            order = next((i for i, t in enumerate(ORDER) if track.startswith(t)), len(ORDER))
            self._name(pid, 0, "process_name", {"name": track})
            self._name(pid, 0, "process_sort_index", {"sort_index": order})
        tid = _FIRST_TID + 1 + sum(len(lanes) for lanes, _ in self._groups.values())
        label = f"{group} {len(lanes)}" if group == "slot" or group in CALLS else group
        self._name(pid, tid, "thread_name", {"name": label})
        lanes.append(Lane(pid, tid, free))
        return lanes[-1]

    def _free(self, lane: Lane) -> None:
        heapq.heappush(lane.free, lane)

    def _name(self, pid: int, tid: int, what: str, args: dict[str, Any]) -> None:
        self._names.append(Line(pid, tid, "M", 0, name=what, args=as_json(args)))
        self._lines.append(self._names[-1])

    def _begin(
        self, lane: Lane, cat: str, key: str, ts: float, args: Raw | None, arrows: Arrows
    ) -> None:
        """Begin a slice in `lane`. Its line comes at its end, or when `write_begun` finds it."""
        lead, led = arrows
        name, bind = f"{cat} {key}" if key else cat, led if lead is None else lead
        about = cat, name, args, bind, lead is not None, led is not None
        lane.line, lane.written = Line(lane.pid, lane.tid, "X", ts, None, *about), False
        self._open[lane.tid] = lane

    def _end(self, lane: Lane, ts: float, args: Raw | None = None) -> None:
        """End the slice of `lane`, which stays taken."""
        del self._open[lane.tid]
        line, ts = lane.line, max(ts, self._cut, lane.line.ts)  # An end may come late.
        if lane.written:
            line = Line(lane.pid, lane.tid, "E", ts, args=args)
        else:
            line.dur = ts - line.ts
            if args and line.args:
                args = Raw(bytes(line.args)[:-1] + b"," + bytes(args)[1:])
            line.args = args or line.args
        self._lines.append(line)

    def _write_begun(self, before: float) -> None:
        """Add the begin of each open slice that began before `before`."""
        for lane in self._open.values():
            if not lane.written and lane.line.ts < before:
                lane.line.ph = "B"
                self._lines.append(lane.line)
                lane.written = True
