"""The timeline: who computes, who waits and for what, over time.

Two windows have every single span: the steady state and the slowest version.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from millrace.observe.timing import TOTALS
from millrace.persist.accounts import Device, Line
from millrace.persist.run_reader import RunReader
from millrace.report.accounts import IDLE, IDLE_TRACK, VALIDATION
from millrace.report.page import figures as fig
from millrace.report.page.figures import (
    STATES,
    Array,
    Block,
    StateStyle,
    figure,
    label,
    moments,
    rounded,
)
from millrace.report.page.head import run_seconds
from millrace.report.trace.chrome import SAMPLES
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
    tokens, ended = Counter[tuple[int, str]](), set[tuple[int, str]]()
    trained: set[str] = set()
    for span in spans:
        by, track, name = shift[span.attempt], span.track, span.name
        start, end = span.start + by, span.end + by
        if name == "request":
            validates = span.key.startswith(VALIDATION)
            requests.setdefault(track, []).append((start, end, validates))
            count: Any = span.facts.get("tokens")
            response = span.attempt, span.key
            drawn = type(count) is int and 0 <= count < 2**31
            if drawn and not validates and not (n and _number(span.key.split("/")[1:2]) >= n):
                tokens[response] += count  # one that was interrupted has several requests
                if span.facts.get("stop") not in (None, "interrupted"):
                    ended.add(response)
        elif name == "thinned":  # anybody may have written the file
            every = span.facts.get("every")
            known = type(every) is int and 0 < every < 2**31
            found.thinned.append((start, int(every or 1) if known else 1))
        elif track == SAMPLES:
            if name == "sealed":
                trained.add(span.key)
        elif track == "trainer" and name in fig.PARTS and end > start:
            found.trainer.append((start, end, name))
        elif track == IDLE_TRACK and (name in fig.PARTS or name in STATES) and end > start:
            idle.append((start, end, NAMES.index(fig.state_of(name))))
        elif name in _WORKS and track.startswith("rollout-") and end > start:
            replicas.setdefault(track, []).append((start, end, _WORKS[name]))
        elif track in ("sync", "validation", "checkpoint") and name not in fig.PARTS:
            found.marks.setdefault(f"{track} {name}", []).append((start, end, span.key))

    def by_number(item: tuple[str, object]) -> tuple[int, str]:
        return _number(item[0].split("-")[-1:]), item[0]

    found.thinned = sorted([*found.thinned, *((float(start), 1) for start, _ in attempts)])
    found.trainer.sort()
    # A response that a later attempt drew again was lost in a kill: the later one is trained.
    last = {key: attempt for attempt, key in sorted(ended)}
    found.lengths = np.array(
        [(tokens[a, key], key.partition("/")[0] in trained and last[key] == a) for a, key in ended],
        dtype=np.float64,
    ).reshape(-1, 2)
    found.requests, found.replicas = (
        {track: _sorted(rows) for track, rows in sorted(tracks.items(), key=by_number)}
        for tracks in (requests, replicas)
    )
    found.idle = _sorted(idle)
    return found


def _number(text: Sequence[str]) -> int:
    """Return the number in the first text, or 0: the index of a response, or of a replica."""
    return int(text[0]) if text and re.fullmatch(r"[0-9]{1,9}", text[0]) else 0


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
    pieces = np.array([(a, b, NAMES.index(fig.state_of(name))) for a, b, name in spans.trainer])
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


BINS = 300
"""The most bins of time."""
MOST_LANES = 12
"""The most devices of a chart."""
MOST_SPANS = 1500
"""The most requests of a window."""

Strips = dict[str, list[tuple[float, float, str]]]

_READ = (
    "A lane is a device. Plain colours compute, hatched ones wait. Drag to zoom, double-click to "
    "reset."
)


def timeline(run: RunReader, found: Spans) -> list[Block]:
    """Return the charts of time: the whole run, and two windows with single spans."""
    colocated = run.key("async_training.placement") == "colocated"
    if found.end > 0 and (every := lanes(found, colocated=colocated)):
        edges, note = np.linspace(0, found.end, BINS + 1), _note(run, found, every)
        some = np.unique(np.linspace(0, len(every) - 1, MOST_LANES).astype(int))
        chosen = [every[i] for i in some]
        parts = [(lane.name, shares(lane, edges)) for lane in chosen]
        borders = [float(start) for start in found.attempts[1:, 0]]
        return [_shares(edges, parts, borders, note, _strips(found)), *windows(found, chosen)]
    why = "`report.trace=false`" if run.key("report.trace") is False else "the folder has no trace/"
    if made := _from_accounts(run.accounts):
        note = f"From the accounts of each version, without single spans: {why}."
    elif made := _from_accounts(_accounts_of_rows(run)):
        note = f"Only the trainer's time is known: {why}, and there is no accounts.jsonl."
    if made:
        edges, parts, borders = made
        return [_shares(edges, parts[:MOST_LANES], borders, note, {})]
    return [fig.missing("timeline", f"{why}, and the metrics have no times.")]


def _note(run: RunReader, found: Spans, every: list[Lane]) -> str:
    """Return what a point is, and what the chart or the trace has less than the run."""
    words, whole = f"A point is the mean of {fig.seconds(found.end / BINS)}.", run_seconds(run)
    if len(every) > MOST_LANES:
        words += f" {MOST_LANES} of {len(every)} devices are shown; the table below has all."
    if found.end <= 0.95 * whole:
        words += (
            f" The trace has {fig.seconds(found.end)} of {fig.seconds(whole)}: an attempt wrote none "
            "(`report.trace`), or it reached its limit (`report.trace_mb`)."
        )
    if found.every() > 1:
        words += (
            " The states come from all samples, also from those that the trace does not show "
            "(`report.trace_load`)."
        )
    return words


def _from_accounts(
    lines: Sequence[Line],
) -> tuple[Array, list[tuple[str, Array]], list[float]] | None:
    """Return edges of time, shares by device, and the attempts' borders, from the accounts."""
    edges, borders = [0.0], []
    parts: dict[str, list[dict[str, float]]] = {}
    for attempt in sorted({line.attempt for line in lines}):
        mine = [line for line in lines if line.attempt == attempt]
        mine = mine[:: max(1, len(mine) // BINS)] + mine[-1:]
        if edges[-1] > 0:
            borders.append(edges[-1])
        for before, after in itertools.pairwise(mine):
            width = after.seconds - before.seconds
            if not 0 < width < 1e9:
                continue
            edges.append(edges[-1] + width)
            for track, device in after.devices.items():
                earlier = before.devices[track].seconds if track in before.devices else {}
                spent = {k: (v - earlier.get(k, 0.0)) / width for k, v in device.seconds.items()}
                bins = parts.setdefault(track, [])
                bins += [{} for _ in range(len(edges) - 2 - len(bins))] + [spent]
    if not parts:
        return None
    tables = []
    for track, bins in parts.items():
        tables.append((track, table := np.zeros((len(edges) - 1, len(NAMES)))))
        for i, spent in enumerate(bins):
            for name, value in spent.items():
                table[i, NAMES.index(fig.state_of(name))] += max(0.0, value)
    return np.array(edges), tables, borders


def _accounts_of_rows(run: RunReader) -> list[Line]:
    """Return the trainer's time in the rows of metrics as lines of accounts."""
    start, spent, seconds, lines = "timing_share/", Counter[str](), 0.0, list[Line]()
    for version, row in [(0, dict[str, float]()), *sorted(run.rows.items())]:
        step = row.get("timing_s/step", 0.0)
        parts = {n.removeprefix(start): v * step for n, v in row.items() if n.startswith(start)}
        spent.update({name: v for name, v in parts.items() if name not in TOTALS})
        seconds += step
        device = Device(1, dict(spent))
        lines.append(Line("version", 1, version, 0.0, seconds, 0, {}, devices={"trainer": device}))
    return lines


def _strips(spans: Spans) -> Strips:
    """Return the syncs, validations and checkpoints as a strip each. Close ones become one."""
    strips: Strips = {}
    least = spans.end / 400
    for kind, name in (("sync", "sync"), ("validation", "validate"), ("checkpoint", "save")):
        pieces = sorted(p for n, found in spans.marks.items() if n.startswith(kind) for p in found)
        joined: list[tuple[float, float, str]] = []
        for start, end, key in pieces:
            if joined and start - joined[-1][1] < least:
                begin, until, keys = joined[-1]
                first = keys.partition(" to ")[0]
                both = first if first == key else f"{first} to {key}"
                joined[-1] = begin, max(until, end), both
            else:
                joined.append((start, end, key))
        if joined:
            strips[name] = joined
    return strips


def _shares(
    edges: Array,
    parts: Sequence[tuple[str, Array]],
    borders: Sequence[float],
    note: str,
    strips: Strips,
) -> Block:
    """Return the chart of the whole run: a lane of stacked shares for each device."""
    data: list[dict[str, Any]] = []
    strip = 0.09 + 0.2 * len(strips) if strips else 0.0
    rows = len(parts) + strip
    layout: dict[str, Any] = {"xaxis": _seconds(0, edges[-1]) | {"anchor": "free", "position": 0}}
    shown: set[str] = set()
    for i, (name, table) in enumerate(parts):
        axis, top = "" if i == 0 else str(i + 1), 1 - i / rows
        layout[f"yaxis{axis}"] = {"domain": [top - 0.88 / rows, top], "range": [0, 1]}
        layout[f"yaxis{axis}"] |= _ticks([0.5], [label(name, 14)])
        for state, column in zip(NAMES, table.T, strict=True):
            if column.max(initial=0) < 0.001:
                continue
            data.append(_area(state, f"y{axis}", edges, column, state not in shown))
            shown.add(state)
    if strips:
        axis = str(len(parts) + 1)
        data += _strip_bars(strips, f"y{axis}")
        names = [{"validate": "validation", "save": "checkpoint"}.get(n, n) for n in strips]
        domain, span = [0, (strip - 0.09) / rows], [len(strips) - 0.4, -0.6]
        layout[f"yaxis{axis}"] = {"domain": domain, "range": span, "tickfont": {"size": 9}}
        layout[f"yaxis{axis}"] |= _ticks(range(len(strips)), names)
    attempts = [(x, f"attempt {i}") for i, x in enumerate(borders, start=2)]
    layout |= _moments(attempts, 2, "dash")
    if borders:
        note += (
            " A dashed line is a kill or a stop, and the resume after it; the time between them "
        )
        note += "is cut out."
    how = f"{_READ} {_largest_wait(edges, parts)}"
    return figure(how, data, int(110 + 74 * rows), note, **layout)


def _seconds(begin: float, end: float) -> dict[str, Any]:
    """Return the axis of time."""
    return {"title": {"text": "seconds of RL"}, "range": moments([begin, end])}


def _ticks(values: Sequence[float], names: Sequence[str]) -> dict[str, Any]:
    """Return the names of lanes on the vertical axis, which does not zoom."""
    ticks = {"tickvals": list(values), "ticktext": list(names)}
    return ticks | {"fixedrange": True, "showgrid": False}


def _moments(found: Sequence[tuple[float, str]], width: int, dash: str) -> dict[str, Any]:
    """Return a vertical line with a name at each moment."""
    line = {"width": width, "dash": dash, "color": "#888"}
    above = {"y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False, "font": {"size": 10}}
    across = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": line}
    return {
        "shapes": [{"x0": x, "x1": x, **across} for x, _ in found],
        "annotations": [{"x": x, "text": name, **above} for x, name in found],
    }


def _area(state: str, axis: str, edges: Array, column: Array, legend: bool) -> dict[str, Any]:
    look, shares = STATES[state], [*np.round(column, 3), round(float(column[-1]), 3)]
    return fig.area(look.words, moments(edges), shares, look.colour, axis, shape="hv") | {
        "legendgroup": state,
        "showlegend": legend,
        "yaxis": axis,
        "fillpattern": look.hatch,
        "hovertemplate": f"{look.words} %{{y:.0%}}<extra></extra>",
    }


def _strip_bars(strips: Strips, axis: str) -> list[dict[str, Any]]:
    return [
        _times(look, [(a, b - a, row) for a, b, _ in pieces], line=edge)
        | {
            "legendgroup": state,
            "showlegend": False,
            "yaxis": axis,
            "text": [f"version {label(key)}" for _, _, key in pieces],
            "textposition": "none",
            "hovertemplate": "%{text}, from %{base:.1f} s<extra></extra>",
        }
        for row, (state, pieces) in enumerate(strips.items())
        for look in [STATES[state]]
        for edge in [{"width": 1, "color": look.colour}]
    ]


def _times(
    look: StateStyle, pieces: Sequence[tuple[float, float, float]], **marker: Any
) -> dict[str, Any]:
    """Return a bar of time for each begin, length and row."""
    begins, lengths, rows = map(list, zip(*pieces, strict=True))
    marker = {"color": look.colour} | marker
    return fig.bars(rows, lengths, marker, across=True, name=look.words, base=moments(begins))


def _largest_wait(edges: Array, parts: Sequence[tuple[str, Array]]) -> str:
    """Return the largest wait of all devices in words, with the keys that shorten it."""
    widths = np.diff(edges)
    waits = [
        (float((table[:, i] * widths).sum() / widths.sum()), name, state)
        for name, table in parts
        for i, state in enumerate(NAMES)
        if STATES[state].waits and state != "tail"
    ]
    if not waits or max(waits)[0] < 0.05:
        return "No device waits for more than 5 % of the time."
    share, name, state = max(waits)
    words = f"{name} {STATES[state].words} {100 * share:.0f} % of the time"
    return f"The largest wait: {words}. This shortens it: {STATES[state].lifts}."


def windows(spans: Spans, lanes: list[Lane]) -> list[Block]:
    """Return a chart of the steady state and one of the slowest version.

    No window has the border of two attempts, where the same or an earlier version goes live again.
    """
    activated = spans.marks.get("sync activate", [])
    marks = sorted((end, int(k)) for _, end, k in activated if k.isdecimal() and len(k) < 16)
    live, version = np.array([end for end, _ in marks]), np.array([number for _, number in marks])
    whole = np.flatnonzero(np.diff(version) > 0)
    if not len(whole):
        return []
    durations = np.diff(live)
    middle = whole[len(whole) // 4 : max(len(whole) * 3 // 4, len(whole) // 4 + 1)]
    usual = int(middle[np.argsort(durations[middle])[len(middle) // 2]])
    later = whole[2 if len(whole) > 6 else 0 :]
    slowest = int(later[np.argmax(durations[later])])
    last = usual + 1
    while last < usual + 3 and last in whole:
        last += 1
    blocks = [_window(spans, lanes, float(live[usual]), float(live[last]), "The steady state")]
    if slowest != usual:
        ratio = durations[slowest] / max(float(np.median(durations[whole])), 1e-9)
        title = f"The slowest version, {ratio:.1f} times the median"
        blocks.append(_window(spans, lanes, float(live[slowest]), float(live[slowest + 1]), title))
    return blocks


def _window(spans: Spans, lanes: list[Lane], begin: float, end: float, title: str) -> Block:
    """Return the Gantt chart of all lanes from `begin` to `end`, or less if there is too much."""
    chosen = {t: r[(r[:, 1] > begin) & (r[:, 0] < end)] for t, r in spans.requests.items()}
    chosen = {lane.track: chosen[lane.track] for lane in lanes if lane.track in chosen}
    count = sum(map(len, chosen.values()))
    note = ""
    if count > MOST_SPANS:
        starts = np.sort(np.concatenate([r[:, 0] for r in chosen.values()]))
        end = max(float(starts[MOST_SPANS]), begin + (end - begin) * MOST_SPANS / count / 2)
        chosen = {t: r[r[:, 0] < end][:MOST_SPANS] for t, r in chosen.items()}
        drawn = sum(map(len, chosen.values()))
        note = f"Cut after {drawn} requests; the files in RUN/trace/ have more for Perfetto. "
    if (every := spans.every(begin, end)) > 1:
        note += (
            f"The trace has one sample in {every} here, and `report.trace_load=1` has "
            "all. Where a device draws responses and no thin line is below it, a request ran that is not "
            "shown."
        )
    tops = np.cumsum([0.0, *(1.0 if lane.track in chosen else 0.4 for lane in lanes)]).tolist()
    data = _bars(lanes, tops, begin, end)
    for lane, top in zip(lanes, tops, strict=False):
        if lane.track in chosen:
            data += _requests(chosen[lane.track], begin, end, top)
    live = spans.marks.get("sync activate", [])
    marks = [(at, f"v{label(key, 8)}") for _, at, key in live if begin <= at <= end]
    names = [label(lane.name, 14) for lane in lanes]
    lane_axis = _ticks([top + 0.15 for top in tops[:-1]], names) | {"zeroline": False}
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "xaxis": _seconds(begin, end),
        "yaxis": lane_axis | {"range": [tops[-1], -0.05]},
        **_moments(marks[:30], 1, "dot"),
    }
    how = (
        f"{title}: {fig.seconds(end - begin)}. The thick bar is the device's state, a thin line is one "
        "request, a dotted line is the moment at which a version goes live. A few long thin lines "
        "under idle devices are the long tail: `rollout.max_response_length`, or a mode that "
        "does not wait for them (`async_training.on_sync`)."
    )
    return figure(how, data, int(120 + 90 * tops[-1]), note, **layout)


def _bars(lanes: list[Lane], tops: list[float], begin: float, end: float) -> list[dict[str, Any]]:
    """Return a bar for every state of every lane, as one trace for each state."""
    pieces: dict[int, list[tuple[float, float, float]]] = {}
    for lane, top in zip(lanes, tops, strict=False):
        inside = (lane.ends > begin) & (lane.starts < end)
        rows = (lane.starts[inside], lane.ends[inside], lane.states[inside])
        for start, stop, state in zip(*rows, strict=True):
            a, b = max(float(start), begin), min(float(stop), end)
            pieces.setdefault(int(state), []).append((a, b - a, top + 0.15))
    return [
        _times(look, found[:2000], pattern=look.hatch, line={"width": 0})
        | {"width": 0.26, "hovertemplate": f"{look.words} %{{x:.3f}} s<extra></extra>"}
        for state, found in sorted(pieces.items())
        for look in [STATES[NAMES[state]]]
    ]


def _requests(rows: Array, begin: float, end: float, top: float) -> list[dict[str, Any]]:
    """Return a thin line for each request. Requests at the same time have rows of their own."""
    free: list[float] = []
    places = np.zeros(len(rows))
    for i, (start, stop, _) in enumerate(rows):
        row = next((k for k, until in enumerate(free) if until <= start), len(free))
        free[row : row + 1] = [stop]
        places[i] = row
    height = 0.62 / max(len(free), 1)
    data = []
    for kind, state in ((0, "generate"), (1, "validate")):
        mine = rows[:, 2] == kind
        if not mine.any():
            continue
        gaps = np.full(int(mine.sum()), np.nan)
        x = np.column_stack([np.clip(rows[mine, :2], begin, end), gaps])
        y = top + 0.34 + height * (places[mine] + 0.5)
        look = STATES[state]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": look.words,
                "showlegend": False,
                "x": moments(x.ravel()),
                "y": rounded(np.column_stack([y, y, gaps]).ravel()),
                "line": {"color": look.colour, "width": max(1, min(5, round(50 * height)))},
                "hoverinfo": "x",
            }
        )
    return data
