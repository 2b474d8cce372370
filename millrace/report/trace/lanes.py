"""The lines of a Chrome trace, and its lanes: a process for each track, a thread for each lane."""

from __future__ import annotations

import heapq

import msgspec
from msgspec import Raw

from millrace.report.trace.facts import as_json

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
_FIRST_TID = 1000
"""No thread may have the number of a process: it would be that process's main thread."""


def both(first: Raw, second: Raw) -> Raw:
    """Return the facts of two objects that are not empty."""
    return Raw(bytes(first)[:-1] + b"," + bytes(second)[1:])


OPEN, GAP, CONTINUES, CONTINUED = (
    as_json({word: True}) for word in ("open", "gap", "continues", "continued")
)
"""Why a slice ends without its end, and how it goes on in the next file."""


class Line(msgspec.Struct, omit_defaults=True, gc=False):
    """One line of a trace. `pid` comes first, so that a reader can skip a track unread."""

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


class Pool:
    """The lanes of one group of a track."""

    __slots__ = ("free", "lanes")

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.free: list[int] = []
        """A heap of the numbers of the free lanes."""


class Lane:
    """A thread of a track. It has one slice at a time."""

    __slots__ = ("line", "number", "pid", "pool", "tid", "written")

    def __init__(self, pid: int, tid: int, number: int, pool: Pool) -> None:
        self.pid, self.tid, self.number, self.pool = pid, tid, number, pool
        self.line = Line(pid, tid, "X", 0.0)
        """The newest slice, from its begin on. A short slice is this one line."""
        self.written = False
        """Whether a line of its begin is in the file already."""


class Lanes:
    """The lanes of all tracks. A free lane is taken again, the first one of its group first."""

    def __init__(self) -> None:
        self.names: list[Line] = []
        """The names of all lanes and tracks so far. Each file has them."""
        self.open: dict[int, Lane] = {}
        """The lanes that have a slice, by thread."""
        self._pids: dict[str, int] = {}
        self._pools: dict[tuple[str, str], Pool] = {}
        self._tids = _FIRST_TID
        self._cut = 0.0
        """When the file began."""

    def take(self, track: str, group: str, out: list[Line]) -> Lane:
        """Return a free lane."""
        pool = self._pools.get((track, group))
        if pool is None:
            pool = self._pools[track, group] = Pool()
        if pool.free:
            return pool.lanes[heapq.heappop(pool.free)]
        return self._make(track, group, pool, out)

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

    def end(self, lane: Lane, ts: float, out: list[Line], args: Raw | None = None) -> None:
        """End the slice of `lane`, which stays taken."""
        del self.open[lane.tid]
        line, ts = lane.line, max(ts, self._cut, lane.line.ts)  # An end may come late.
        if lane.written:
            line = Line(lane.pid, lane.tid, "E", ts, args=args)
        else:
            line.dur = ts - line.ts
            if args:
                line.args = both(line.args, args) if line.args else args
        out.append(line)

    def write_begun(self, before: float, out: list[Line]) -> None:
        """Write the begin of each open slice that began before `before`."""
        for lane in self.open.values():
            if not lane.written and lane.line.ts < before:
                lane.line.ph = "B"
                out.append(lane.line)
                lane.written = True

    def free(self, lane: Lane) -> None:
        heapq.heappush(lane.pool.free, lane.number)

    def end_all(self, ts: float, out: list[Line], args: Raw) -> None:
        """End every slice and free its lane."""
        for lane in list(self.open.values()):
            self.end(lane, ts, out, args)
            self.free(lane)

    def cut(self, ts: float) -> tuple[list[Line], list[Line]]:
        """Return the end of one file and the head of the next one. Open slices are in both."""
        ends, heads, self._cut = list[Line](), list(self.names), ts
        self.write_begun(ts + 1, ends)
        for lane in self.open.values():
            ends.append(Line(lane.pid, lane.tid, "E", ts, args=CONTINUES))
            arrow = lane.line.bind_id if lane.line.flow_out else None
            heads.append(
                Line(
                    *(lane.pid, lane.tid, "B", ts, None, lane.line.cat, lane.line.name),
                    *(CONTINUED, arrow, arrow is not None),
                )
            )
        return ends, heads

    def _make(self, track: str, group: str, pool: Pool, out: list[Line]) -> Lane:
        pid = self._pids.get(track)
        if pid is None:
            pid = self._pids[track] = len(self._pids) + 1
            order = next((i for i, t in enumerate(ORDER) if track.startswith(t)), len(ORDER))
            self._name(pid, 0, "process_name", as_json({"name": track}), out)
            self._name(pid, 0, "process_sort_index", as_json({"sort_index": order}), out)
        number = len(pool.lanes)
        self._tids += 1
        label = f"{group} {number}" if group in ("request", "score", "log_probs", "slot") else group
        self._name(pid, self._tids, "thread_name", as_json({"name": label}), out)
        pool.lanes.append(Lane(pid, self._tids, number, pool))
        return pool.lanes[number]

    def _name(self, pid: int, tid: int, what: str, args: Raw, out: list[Line]) -> None:
        line = Line(pid, tid, "M", 0, name=what, args=args)
        self.names.append(line)
        out.append(line)
