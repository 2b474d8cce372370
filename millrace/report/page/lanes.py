"""Lanes: the states of each device over time, from the spans of a trace.

A lane is cut where its state changes. An idle replica waits for what has the slots, by the rule of
report/accounts/devices.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.report.accounts.tokens import VALIDATION
from millrace.report.page.figures import Array
from millrace.report.page.states import PARTS, STATES, state_of
from millrace.report.trace.calls import SCORING, WORK
from millrace.report.trace.spans import Span

NAMES = tuple(STATES)
_OF_TRAINER, _OF_SYNC = ("ready", "taken"), ("trained", "sealed")
_DRAWN = ("waiting", "running")
_ROLLOUTS_TURN = (NAMES.index("wait_trajectories"), NAMES.index("wait_rewards"))
"""The trainer's states in which the rollouts have shared devices."""


@dataclass
class Lane:
    """The states of one device: pieces of time in order."""

    name: str
    """The name in charts."""
    track: str
    starts: Array
    ends: Array
    states: Array
    """Indices of NAMES."""


@dataclass
class Spans:
    """The spans of a trace, in columns."""

    trainer: list[tuple[float, float, str]] = field(default_factory=list)
    """The trainer's states."""
    requests: dict[str, Array] = field(default_factory=dict)
    """Start, end, and whether it validates, of each replica's requests that were drawn."""
    work: dict[str, Array] = field(default_factory=dict)
    """The same, and the times in which any request ran."""
    thinned: list[tuple[float, int]] = field(default_factory=list)
    """From each of these moments on, the trace has the requests and scores of one sample in so many."""
    slots: dict[str, Array] = field(default_factory=dict)
    """Start and end of every stay of a sample in each state."""
    pauses: Array = field(default_factory=lambda: np.empty((0, 2)))
    scores: Array = field(default_factory=lambda: np.empty((0, 2)))
    marks: dict[str, list[tuple[float, float, str]]] = field(default_factory=dict)
    """Start, end and key of syncs, validations and checkpoints."""
    lengths: Array = field(default_factory=lambda: np.empty((0, 2)))
    """Tokens of every response that ended, and whether it was trained."""
    attempts: Array = field(default_factory=lambda: np.empty((0, 2)))
    """Start and end of each attempt."""
    end: float = 0.0

    def every(self, begin: float = 0.0, end: float = np.inf) -> int:
        """Return the largest such number from `begin` to `end`. 1 if all were drawn."""
        before = [every for at, every in self.thinned if at <= begin]
        return max(before[-1:] + [every for at, every in self.thinned if begin < at < end] or [1])


def columns(spans: Sequence[Span], n: int = 0) -> Spans:
    """Return the spans in columns. The time between two attempts is cut out.

    A sample has `n` responses. A further one is a greedy baseline, whose length is left out.
    """
    shift, attempts = _squeezed(spans)
    found = Spans(attempts=attempts, end=float(attempts[-1, 1]) if len(attempts) else 0.0)
    requests: dict[str, list[tuple[float, float, float]]] = {}
    slots: dict[str, list[tuple[float, float]]] = {}
    work: dict[str, list[tuple[float, float, float]]] = {}
    pairs: dict[str, list[tuple[float, float]]] = {"pause": [], "score": []}
    lengths = _Lengths()
    for span in spans:
        by, track, name = shift[span.attempt], span.track, span.name
        start, end = span.start + by, span.end + by
        if name == "request":
            validates = span.key.startswith(VALIDATION)
            requests.setdefault(track, []).append((start, end, validates))
            work.setdefault(track, []).append((start, end, validates))
            if not validates and not (n and _index(span.key) >= n):
                lengths.add(span)
        elif name in WORK:
            work.setdefault(track, []).append((start, end, WORK[name]))
        elif name == SCORING:
            pairs["score"].append((start, end))
        elif name == "thinned":
            found.thinned.append((start, _count(span.facts.get("every"))))
        elif track == "samples":
            slots.setdefault(name, []).append((start, end))
            if name == "sealed":
                lengths.trained.add(span.key)
        elif track == "trainer" and name in PARTS and end > start:
            found.trainer.append((start, end, name))
        elif name in pairs:
            pairs[name].append((start, end))
        elif track in ("sync", "validation", "checkpoint"):
            found.marks.setdefault(f"{track} {name}", []).append((start, end, span.key))
    found.thinned = sorted([*found.thinned, *((float(start), 1) for start, _ in attempts)])
    found.trainer.sort()
    found.lengths = lengths.table()
    found.requests, found.work = (
        {track: _sorted(rows, 3) for track, rows in sorted(tracks.items(), key=_by_number)}
        for tracks in (requests, work)
    )
    found.slots = {name: _sorted(rows, 2) for name, rows in slots.items()}
    found.pauses, found.scores = _sorted(pairs["pause"], 2), _sorted(pairs["score"], 2)
    return found


def _count(value: object) -> int:
    """Return a fact of a file that anybody may have written, if it can be a count."""
    return value if type(value) is int and 0 < value < 2**31 else 1


def _index(key: str) -> int:
    """Return the index of a response in its sample."""
    part = key.partition("/")[2].partition("/")[0]
    return int(part) if re.fullmatch(r"[0-9]{1,9}", part) else 0


class _Lengths:
    """The lengths of responses. A response that was interrupted has several requests."""

    def __init__(self) -> None:
        self.trained: set[str] = set()
        """Samples that were trained."""
        self._tokens: dict[tuple[int, str], float] = {}
        self._ended: set[tuple[int, str]] = set()

    def add(self, span: Span) -> None:
        tokens, key = span.facts.get("tokens"), (span.attempt, span.key)
        if isinstance(tokens, int):
            self._tokens[key] = self._tokens.get(key, 0.0) + tokens
            if span.facts.get("stop") not in (None, "interrupted"):
                self._ended.add(key)

    def table(self) -> Array:
        # A response that a later attempt drew again was lost in a kill: the later one is trained.
        last = {key: attempt for attempt, key in sorted(self._ended)}
        rows = [
            (
                self._tokens[attempt, key],
                key.partition("/")[0] in self.trained and last[key] == attempt,
            )
            for attempt, key in self._ended
        ]
        return np.array(rows, dtype=np.float64).reshape(-1, 2)


def _squeezed(spans: Sequence[Span]) -> tuple[dict[int, float], Array]:
    """Return what to add to the times of each attempt, and the attempts' starts and ends."""
    times: dict[int, tuple[float, float]] = {}
    for span in spans:
        start, end = times.get(span.attempt, (span.start, span.end))
        times[span.attempt] = min(start, span.start), max(end, span.end)
    shift, placed, at = {}, [], 0.0
    for attempt in sorted(times):
        start, end = times[attempt]
        shift[attempt] = at - start
        placed.append((at, at + end - start))
        at += end - start
    return shift, np.array(placed).reshape(-1, 2)


def _by_number(item: tuple[str, object]) -> tuple[int, str]:
    tail = item[0].rpartition("-")[2]
    return (int(tail) if re.fullmatch(r"[0-9]{1,9}", tail) else 0, item[0])


def _sorted(rows: Sequence[tuple[float, ...]], width: int) -> Array:
    if not rows:
        return np.empty((0, width))
    made = np.array(rows, dtype=np.float64)
    return made[np.argsort(made[:, 0], kind="stable")]


def lanes(
    spans: Spans, capacity: int, *, colocated: bool, complete: bool, tools: bool = False
) -> list[Lane]:
    """Return a lane for the trainer and one for each replica.

    `capacity` is the number of slots. On shared devices the replicas have the trainer's states in
    its turn, and the trainer has no lane. A complete run ends once it needs no more samples.
    `tools` says whether sessions wait for tools and environments.
    """
    trainer = _trainer(spans)
    made = [] if trainer is None or (colocated and spans.work) else [trainer]
    waits = _Waits(spans, capacity, complete, tools)
    for track, work in spans.work.items():
        made.append(_replica(track, work, spans, waits, trainer if colocated else None))
        if colocated:
            made[-1].name = track.replace("rollout", "shared")
    return made


def _trainer(spans: Spans) -> Lane | None:
    """Return the trainer's lane. A wait for samples is one for rewards if nothing is drawn."""
    if not spans.trainer:
        return None
    busy = np.concatenate([union(r) for r in spans.work.values()] or [np.empty((0, 2))])
    busy = union(busy[np.argsort(busy[:, 0])])
    scored = union(spans.scores)
    pieces = np.array([(a, b, NAMES.index(state_of(name))) for a, b, name in spans.trainer])
    cuts = np.unique(np.concatenate([pieces[:, :2].ravel(), busy.ravel(), scored.ravel()]))
    starts, ends = cuts[:-1], cuts[1:]
    middle = (starts + ends) / 2
    at = np.clip(np.searchsorted(pieces[:, 0], middle, side="right") - 1, 0, None)
    states = pieces[at, 2].astype(np.int64)
    inside = (middle >= pieces[at, 0]) & (middle < pieces[at, 1])
    waits = states == NAMES.index("wait_trajectories")
    rewards = waits & ~within(busy, middle) & within(scored, middle)
    states[rewards] = NAMES.index("wait_rewards")
    return _merged("trainer", starts[inside], ends[inside], states[inside])


class _Waits:
    """What every idle replica waits for, over time: pieces of time with one state each."""

    def __init__(self, spans: Spans, capacity: int, complete: bool, tools: bool) -> None:
        self._capacity, self._pauses = capacity, union(spans.pauses)
        self._tools, self._scored = tools, union(spans.scores)
        self._starts = {name: np.sort(rows[:, 0]) for name, rows in spans.slots.items()}
        self._ends = {name: np.sort(rows[:, 1]) for name, rows in spans.slots.items()}
        drawn = np.concatenate([union(r) for r in spans.work.values()] or [np.empty((0, 2))])
        self._drawn = union(drawn[np.argsort(drawn[:, 0])])
        self._retired = self._ends.get("sealed", np.empty(0))
        self._complete = complete
        moves = [*self._starts.values(), *self._ends.values(), self._pauses.ravel()]
        moves += [self._scored.ravel()] if tools else []
        cuts = np.unique(np.concatenate([*moves, self._drawn.ravel(), [0.0, spans.end]]))
        states = self._at((cuts[:-1] + cuts[1:]) / 2)
        pieces = _merged("", cuts[:-1], cuts[1:], states)
        self.starts, self._states = pieces.starts, pieces.states

    def at(self, times: Array) -> Array:
        """Return the states at these times, as indices of NAMES."""
        if not len(self.starts):
            return np.full(len(times), NAMES.index("other"))
        place = np.searchsorted(self.starts, times, side="right") - 1
        return self._states[np.clip(place, 0, None)]

    def _count(self, names: Iterable[str], times: Array) -> Array:
        total = np.zeros(len(times), dtype=np.int64)
        for name in names:
            if name in self._starts:
                total += np.searchsorted(self._starts[name], times, side="right")
                total -= np.searchsorted(self._ends[name], times, side="right")
        return total

    def _at(self, times: Array) -> Array:
        trainer, sync = self._count(_OF_TRAINER, times), self._count(_OF_SYNC, times)
        drawing = self._count(_DRAWN, times)
        states = np.full(len(times), NAMES.index("other"))
        occupied = drawing + trainer + sync
        full = occupied >= self._capacity
        # The run needs no more samples than those that it retires until its end.
        needed = len(self._retired) - np.searchsorted(self._retired, times, side="right")
        behind = np.maximum(trainer, sync) >= drawing
        running = within(self._drawn, times)
        in_tools = full & ~behind & ~running & ~within(self._scored, times) & self._tools
        for mask, name in (
            (full & behind & (trainer >= sync), "wait_trainer"),
            (full & behind & (trainer < sync), "wait_sync"),
            (full & ~behind & running, "wait_trajectories"),
            (full & ~behind & ~running, "wait_rewards"),
            (in_tools, "wait_tools"),
            (self._complete & (occupied >= needed), "tail"),
            (within(self._pauses, times), "sync"),
        ):
            states[mask] = NAMES.index(name)
        return states


def _replica(track: str, work: Array, spans: Spans, waits: _Waits, trainer: Lane | None) -> Lane:
    drawn = union(work[work[:, 2] == 0])
    validated = union(work[work[:, 2] == 1])
    lists = [drawn.ravel(), validated.ravel(), waits.starts, np.array([0.0, spans.end])]
    if trainer is not None:
        lists += [trainer.starts, trainer.ends]
    cuts = np.unique(np.concatenate(lists))
    starts, ends = cuts[:-1], cuts[1:]
    middle = (starts + ends) / 2
    states = waits.at(middle)
    if trainer is not None and len(trainer.starts):
        at = np.clip(np.searchsorted(trainer.starts, middle, side="right") - 1, 0, None)
        turn = ~np.isin(trainer.states[at], _ROLLOUTS_TURN)
        states[turn] = trainer.states[at][turn]
    states[within(validated, middle)] = NAMES.index("validate")
    states[within(drawn, middle)] = NAMES.index("generate")
    return _merged(track, starts, ends, states)


def union(rows: Array) -> Array:
    """Return the union of intervals that are sorted by their starts."""
    if not len(rows):
        return np.empty((0, 2))
    latest = np.maximum.accumulate(rows[:, 1])
    first = np.concatenate([[True], rows[1:, 0] > latest[:-1]])
    last = np.concatenate([np.flatnonzero(first)[1:] - 1, [len(rows) - 1]])
    return np.column_stack([rows[first, 0], latest[last]])


def within(intervals: Array, times: Array) -> Array:
    """Return whether each time is in one of the disjoint intervals."""
    if not len(intervals):
        return np.zeros(len(times), dtype=bool)
    at = np.searchsorted(intervals[:, 0], times, side="right") - 1
    return (at >= 0) & (times < intervals[np.clip(at, 0, None), 1])


def _merged(name: str, starts: Array, ends: Array, states: Array) -> Lane:
    """Join neighbouring pieces of the same state."""
    if not len(starts):
        return Lane(name, name, starts, ends, states)
    new = np.concatenate([[True], (states[1:] != states[:-1]) | (starts[1:] > ends[:-1] + 1e-9)])
    first = np.flatnonzero(new)
    last = np.concatenate([first[1:] - 1, [len(starts) - 1]])
    return Lane(name, name, starts[first], ends[last], states[first])


def shares(lane: Lane, edges: Array) -> Array:
    """Return the share of each bin of time that each state takes: bins x states."""
    made = np.zeros((len(edges) - 1, len(NAMES)))
    widths = np.diff(edges)
    for state in np.unique(lane.states):
        mine = lane.states == state
        # The integral of "is in this state" at every edge: it is linear between the changes.
        times = np.column_stack([lane.starts[mine], lane.ends[mine]]).ravel()
        total = np.cumsum(np.column_stack([np.zeros(mine.sum()), (lane.ends - lane.starts)[mine]]).ravel())  # fmt: skip
        made[:, state] = np.diff(np.interp(edges, times, total)) / widths
    return made
