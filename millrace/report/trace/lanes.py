"""The lines of a Chrome trace, and its lanes: a process for each track, a thread for each lane."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from millrace.codec import sendable

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


class Lanes:
    """The lanes of all tracks. A free lane is taken again, the first one of its group first."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        """The lines that are not written yet."""
        self.names: list[Line] = []
        """The names of all lanes and tracks so far. Each file has them."""
        self.open: dict[int, Lane] = {}
        """The lanes that have a slice, by thread."""
        self._pids: dict[str, int] = {}
        self._groups: dict[tuple[str, str], tuple[list[Lane], list[Lane]]] = {}
        """All lanes and the free ones of each group of a track."""
        self._tids = _FIRST_TID
        self._cut = 0.0
        """When the file began."""

    def take(self, track: str, group: str) -> Lane:
        """Return a free lane."""
        group_ = self._groups.get((track, group))
        if group_ is None:
            group_ = self._groups[track, group] = [], []
        lanes, free = group_
        if free:
            return heapq.heappop(free)
        pid = self._pids.get(track)
        if pid is None:
            pid = self._pids[track] = len(self._pids) + 1
            order = next((i for i, t in enumerate(ORDER) if track.startswith(t)), len(ORDER))
            self._name(pid, 0, "process_name", {"name": track})
            self._name(pid, 0, "process_sort_index", {"sort_index": order})
        self._tids += 1
        many = group in ("request", "score", "log_probs", "slot")
        label = f"{group} {len(lanes)}" if many else group
        self._name(pid, self._tids, "thread_name", {"name": label})
        lanes.append(Lane(pid, self._tids, free))
        return lanes[-1]

    def _name(self, pid: int, tid: int, what: str, args: dict[str, Any]) -> None:
        self.names.append(Line(pid, tid, "M", 0, name=what, args=as_json(args)))
        self.lines.append(self.names[-1])

    def begin(
        self,
        lane: Lane,
        cat: str,
        key: str,
        ts: float,
        args: Raw | None = None,
        arrow_out: int | None = None,
        arrow_in: int | None = None,
    ) -> None:
        """Begin a slice in `lane`. At most one of the arrows is given.

        Its line comes at its end, or when `write_begun` finds it.
        """
        name = f"{cat} {key}" if key else cat
        bind = arrow_in if arrow_out is None else arrow_out
        leads, led = arrow_out is not None, arrow_in is not None
        lane.line = Line(lane.pid, lane.tid, "X", ts, None, cat, name, args, bind, leads, led)
        lane.written = False
        self.open[lane.tid] = lane

    def end(self, lane: Lane, ts: float, args: Raw | None = None) -> None:
        """End the slice of `lane`, which stays taken."""
        del self.open[lane.tid]
        line, ts = lane.line, max(ts, self._cut, lane.line.ts)  # An end may come late.
        if lane.written:
            line = Line(lane.pid, lane.tid, "E", ts, args=args)
        else:
            line.dur = ts - line.ts
            if args and line.args:
                args = Raw(bytes(line.args)[:-1] + b"," + bytes(args)[1:])
            line.args = args or line.args
        self.lines.append(line)

    def write_begun(self, before: float) -> None:
        """Write the begin of each open slice that began before `before`."""
        for lane in self.open.values():
            if not lane.written and lane.line.ts < before:
                lane.line.ph = "B"
                self.lines.append(lane.line)
                lane.written = True

    def free(self, lane: Lane) -> None:
        heapq.heappush(lane.free, lane)

    def end_all(self, ts: float, args: Raw) -> None:
        """End every slice and free its lane."""
        for lane in list(self.open.values()):
            self.end(lane, ts, args)
            self.free(lane)

    def cut(self, ts: float) -> list[Line]:
        """End one file, and return the head of the next one. Open slices are in both."""
        heads, self._cut = list(self.names), ts
        self.write_begun(ts + 1)
        for lane in self.open.values():
            self.lines.append(Line(lane.pid, lane.tid, "E", ts, args=CONTINUES))
            arrow = lane.line.bind_id if lane.line.flow_out else None
            begin = lane.pid, lane.tid, "B", ts, None, lane.line.cat, lane.line.name
            heads.append(Line(*begin, CONTINUED, arrow, arrow is not None))
        return heads
