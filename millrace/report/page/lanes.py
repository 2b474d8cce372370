"""Lanes: the states of each device over time, from the spans of a trace.

A lane is cut where its state changes. The states of replicas are those of report/accounts/devices.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.report.accounts.devices import IDLE, IDLE_TRACK
from millrace.report.accounts.tokens import VALIDATION
from millrace.report.page.figures import Array
from millrace.report.page.states import PARTS, STATES, state_of
from millrace.report.trace.choice import SAMPLES
from millrace.report.trace.spans import Span

NAMES = tuple(STATES)
_WORKS = {
    "generate": NAMES.index("generate"),
    "validate": NAMES.index("validate"),
    IDLE: len(NAMES),
}
"""The own states of a replica. An idle one has the state of all idle replicas instead."""


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
    replicas: dict[str, Array] = field(default_factory=dict)
    """Start, end and state of each replica, one of _WORKS."""
    idle: Array = field(default_factory=lambda: np.empty((0, 3)))
    """Start, end and state of all idle replicas, indices of NAMES."""
    requests: dict[str, Array] = field(default_factory=dict)
    """Start, end, and whether it validates, of each replica's requests that were drawn."""
    thinned: list[tuple[float, int]] = field(default_factory=list)
    """From each of these moments on, the trace has one sample in so many."""
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
    replicas: dict[str, list[tuple[float, float, float]]] = {}
    idle: list[tuple[float, float, float]] = []
    lengths = _Lengths()
    for span in spans:
        by, track, name = shift[span.attempt], span.track, span.name
        start, end = span.start + by, span.end + by
        if name == "request":
            validates = span.key.startswith(VALIDATION)
            requests.setdefault(track, []).append((start, end, validates))
            if not validates and not (n and _number(span.key.split("/")[1:2]) >= n):
                lengths.add(span)
        elif name == "thinned":  # anybody may have written the file
            every = span.facts.get("every")
            known = type(every) is int and 0 < every < 2**31
            found.thinned.append((start, int(every or 1) if known else 1))
        elif track == SAMPLES:
            if name == "sealed":
                lengths.trained.add(span.key)
        elif track == "trainer" and name in PARTS and end > start:
            found.trainer.append((start, end, name))
        elif track == IDLE_TRACK and (name in PARTS or name in STATES) and end > start:
            idle.append((start, end, NAMES.index(state_of(name))))
        elif name in _WORKS and track.startswith("rollout-") and end > start:
            replicas.setdefault(track, []).append((start, end, _WORKS[name]))
        elif track in ("sync", "validation", "checkpoint") and name not in PARTS:
            found.marks.setdefault(f"{track} {name}", []).append((start, end, span.key))

    def by_number(item: tuple[str, object]) -> tuple[int, str]:
        return _number(item[0].split("-")[-1:]), item[0]

    found.thinned = sorted([*found.thinned, *((float(start), 1) for start, _ in attempts)])
    found.trainer.sort()
    found.lengths = lengths.table()
    found.requests, found.replicas = (
        {track: _sorted(rows) for track, rows in sorted(tracks.items(), key=by_number)}
        for tracks in (requests, replicas)
    )
    found.idle = _sorted(idle)
    return found


def _number(text: Sequence[str]) -> int:
    """Return the number in the first text, or 0: the index of a response, or of a replica."""
    return int(text[0]) if text and re.fullmatch(r"[0-9]{1,9}", text[0]) else 0


class _Lengths:
    """The lengths of responses. A response that was interrupted has several requests."""

    def __init__(self) -> None:
        self.trained: set[str] = set()
        """Samples that were trained."""
        self._tokens: dict[tuple[int, str], float] = {}
        self._ended: set[tuple[int, str]] = set()

    def add(self, span: Span) -> None:
        tokens, key = span.facts.get("tokens"), (span.attempt, span.key)
        if type(tokens) is int and 0 <= tokens < 2**31:
            self._tokens[key] = self._tokens.get(key, 0.0) + tokens
            if span.facts.get("stop") not in (None, "interrupted"):
                self._ended.add(key)

    def table(self) -> Array:
        # A response that a later attempt drew again was lost in a kill: the later one is trained.
        last = {key: attempt for attempt, key in sorted(self._ended)}
        rows = []
        for attempt, key in self._ended:
            trained = key.partition("/")[0] in self.trained and last[key] == attempt
            rows.append((self._tokens[attempt, key], trained))
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


def _sorted(rows: Sequence[tuple[float, float, float]]) -> Array:
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return table[np.argsort(table[:, 0], kind="stable")]


def lanes(spans: Spans, *, colocated: bool) -> list[Lane]:
    """Return a lane for the trainer and one for each replica.

    On shared devices the replicas have the trainer's states in its turn, and the trainer has no lane.
    """
    made = [] if not spans.trainer or (colocated and spans.replicas) else [_trainer(spans)]
    for track, states in spans.replicas.items():
        starts, ends, middle = _pieces(states[:, :2], spans.idle[:, :2])
        now, waits = _states(states, middle), _states(spans.idle, middle)
        waits[waits < 0] = NAMES.index("other")
        made.append(_merged(track, starts, ends, np.where(now == _WORKS[IDLE], waits, now)))
        if colocated:
            made[-1].name = track.replace("rollout", "shared")
    return made


def _trainer(spans: Spans) -> Lane:
    """Return the trainer's lane. It waits for rewards, teachers or tools while idle replicas do."""
    pieces = np.array([(a, b, NAMES.index(state_of(name))) for a, b, name in spans.trainer])
    starts, ends, middle = _pieces(pieces[:, :2], spans.idle[:, :2])
    states, waits = _states(pieces, middle), _states(spans.idle, middle)
    causes = [NAMES.index(f"wait_{what}") for what in ("rewards", "teachers", "tools")]
    same = (states == NAMES.index("wait_trajectories")) & np.isin(waits, causes)
    return _merged("trainer", starts, ends, np.where(same, waits, states))


def _pieces(*rows: Array) -> tuple[Array, Array, Array]:
    """Return the starts, the ends and the middles of the times between all starts and ends."""
    cuts = np.unique(np.concatenate([r.ravel() for r in rows]))
    return cuts[:-1], cuts[1:], (cuts[:-1] + cuts[1:]) / 2


def _states(rows: Array, times: Array) -> Array:
    """Return the state at each time, or -1 where there is none. `rows` has start, end and state."""
    if not len(rows):
        return np.full(len(times), -1)
    at = np.clip(np.searchsorted(rows[:, 0], times, side="right") - 1, 0, None)
    inside = (times >= rows[at, 0]) & (times < rows[at, 1])
    return np.where(inside, rows[at, 2].astype(np.int64), -1)


def _merged(name: str, starts: Array, ends: Array, states: Array) -> Lane:
    """Leave out pieces without a state, and join neighbouring ones of the same state."""
    starts, ends, states = (rows[states >= 0] for rows in (starts, ends, states))
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
        times = np.column_stack([lane.starts[mine], lane.ends[mine]])
        spent = np.column_stack([np.zeros(len(times)), np.diff(times)[:, 0]])
        times, total = times.ravel(), np.cumsum(spent.ravel())
        made[:, state] = np.diff(np.interp(edges, times, total)) / widths
    return made
