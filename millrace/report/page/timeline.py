"""The timeline: who computes, who waits and for what, over time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.persist.accounts import Line
from millrace.persist.run_reader import RunReader
from millrace.report.page.figures import (
    Array,
    Block,
    figure,
    label,
    missing,
    moments,
    rounded,
    seconds,
)
from millrace.report.page.head import run_seconds
from millrace.report.page.lanes import NAMES, Lane, Spans, lanes, shares
from millrace.report.page.states import STATES, state_of
from millrace.report.page.window import windows

BINS = 300
"""The most bins of time."""
MOST_LANES = 12
"""The most devices of a chart."""

_READ = (
    "A lane is a device. Plain colours compute, hatched ones wait. Drag to zoom, double-click to "
    "reset."
)


def timeline(run: RunReader, found: Spans) -> list[Block]:
    """Return the charts of time: the whole run, and two windows with single spans."""
    colocated = run.key("async_training.placement") == "colocated"
    if found.end > 0:
        every = lanes(found, colocated=colocated)
        if every:
            edges = np.linspace(0, found.end, BINS + 1)
            parts = [(lane.name, shares(lane, edges)) for lane in _some(every)]
            borders = [float(start) for start in found.attempts[1:, 0]]
            note = _note(every, found.end / BINS) + _untraced(run, found.end) + _some_samples(found)
            whole = _shares(edges, parts, borders, note, _strips(found))
            return [whole, *windows(found, _some(every))]
    why = "`report.trace=false`" if run.key("report.trace") is False else "the folder has no trace/"
    if made := _from_accounts(run.accounts):
        edges, parts, borders = made
        note = f"From the accounts of each version, without single spans: {why}."
        return [_shares(edges, parts[:MOST_LANES], borders, note, {})]
    edges, part = _from_rows(run)
    if len(part):
        note = f"Only the trainer's time is known: {why}, and there is no accounts.jsonl."
        return [_shares(edges, [("trainer", part)], [], note, {})]
    return [missing("timeline", f"{why}, and the metrics have no times.")]


def _some(every: list[Lane]) -> list[Lane]:
    """Return at most MOST_LANES lanes, evenly spread."""
    if len(every) <= MOST_LANES:
        return every
    return [every[i] for i in np.unique(np.linspace(0, len(every) - 1, MOST_LANES).astype(int))]


def _note(every: list[Lane], width: float) -> str:
    words = f"A point is the mean of {seconds(width)}."
    if len(every) > MOST_LANES:
        words += f" {MOST_LANES} of {len(every)} devices are shown; the table below has all."
    return words


def _untraced(run: RunReader, end: float) -> str:
    """Return a sentence if the trace has less than the whole run."""
    whole = run_seconds(run)
    if end > 0.95 * whole:
        return ""
    return (
        f" The trace has {seconds(end)} of {seconds(whole)}: an attempt wrote none "
        "(`report.trace`), or it reached its limit (`report.trace_mb`)."
    )


def _some_samples(found: Spans) -> str:
    """Return a sentence if the trace has some samples only."""
    if found.every() == 1:
        return ""
    return " The states come from all samples, also from those that the trace does not show (`report.trace_load`)."  # fmt: skip


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
    return np.array(edges), [(t, _table(bins, len(edges) - 1)) for t, bins in parts.items()], borders  # fmt: skip


def _from_rows(run: RunReader) -> tuple[Array, Array]:
    """Return edges of time and the trainer's shares from the rows of metrics."""
    rows = [run.rows[v] for v in sorted(run.rows) if run.rows[v].get("timing_s/step", 0) > 0]
    step = max(1, len(rows) // BINS)
    ends = np.cumsum([row["timing_s/step"] for row in rows])
    # A bin has the shares of its first row, and the time of all of its rows.
    edges = np.concatenate([[0.0], ends[step - 1 :: step][: len(rows[::step]) - 1], ends[-1:]])
    rows = rows[::step]
    start, totals = "timing_share/", ("gen", "train", "sync", "step")
    bins = [
        {n.removeprefix(start): v for n, v in row.items() if n.startswith(start) and n.removeprefix(start) not in totals}
        for row in rows
    ]  # fmt: skip
    return edges, _table(bins, len(edges) - 1)


def _table(bins: list[dict[str, float]], count: int) -> Array:
    made = np.zeros((count, len(NAMES)))
    for i, spent in enumerate(bins):
        for name, value in spent.items():
            made[i, NAMES.index(state_of(name))] += max(0.0, value)
    return made


def _strips(spans: Spans) -> dict[str, list[tuple[float, float, str]]]:
    """Return the syncs, validations and checkpoints as a strip each. Close ones become one."""
    strips: dict[str, list[tuple[float, float, str]]] = {}
    least = spans.end / 400
    for kind, name in (("sync", "sync"), ("validation", "validate"), ("checkpoint", "save")):
        pieces = sorted(p for n, found in spans.marks.items() if n.startswith(kind) for p in found)
        joined: list[tuple[float, float, str]] = []
        for start, end, key in pieces:
            if joined and start - joined[-1][1] < least:
                first = joined[-1]
                keys = first[2].partition(" to ")[0]
                joined[-1] = (first[0], max(first[1], end), keys if keys == key else f"{keys} to {key}")  # fmt: skip
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
    strips: dict[str, list[tuple[float, float, str]]],
) -> Block:
    """Return the chart of the whole run: a lane of stacked shares for each device."""
    data: list[dict[str, Any]] = []
    strip = 0.09 + 0.2 * len(strips) if strips else 0.0
    rows = len(parts) + strip
    layout: dict[str, Any] = {
        "xaxis": {
            "title": {"text": "seconds of RL"},
            "range": moments([0, edges[-1]]),
            "anchor": "free",
            "position": 0,
        }
    }  # fmt: skip
    shown: set[str] = set()
    for i, (name, table) in enumerate(parts):
        axis = "" if i == 0 else str(i + 1)
        top = 1 - i / rows
        layout[f"yaxis{axis}"] = {
            "domain": [top - 0.88 / rows, top],
            "range": [0, 1],
            "tickvals": [0.5],
            "ticktext": [label(name, 14)],
            "fixedrange": True,
            "showgrid": False,
        }
        for state, column in zip(NAMES, table.T, strict=True):
            if column.max(initial=0) < 0.001:
                continue
            data.append(_area(state, f"y{axis}", edges, column, state not in shown))
            shown.add(state)
    if strips:
        axis = str(len(parts) + 1)
        data += _strip_bars(strips, f"y{axis}")
        layout[f"yaxis{axis}"] = {
            "domain": [0, (strip - 0.09) / rows],
            "range": [len(strips) - 0.4, -0.6],
            "tickvals": list(range(len(strips))),
            "ticktext": [{"validate": "validation", "save": "checkpoint"}.get(n, n) for n in strips],
            "tickfont": {"size": 9},
            "fixedrange": True,
            "showgrid": False,
        }  # fmt: skip
    layout["shapes"] = [
        {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 2, "dash": "dash", "color": "#888"}}
        for x in borders
    ]  # fmt: skip
    layout["annotations"] = [
        {"x": x, "y": 1, "yref": "paper", "yanchor": "bottom", "text": f"attempt {i}", "showarrow": False, "font": {"size": 10}}
        for i, x in enumerate(borders, start=2)
    ]  # fmt: skip
    if borders:
        note += " A dashed line is a kill or a stop, and the resume after it; the time between them is cut out."  # fmt: skip
    height = int(110 + 74 * rows)
    return figure(f"{_READ} {_largest_wait(edges, parts)}", data, height, note, **layout)


def _area(state: str, axis: str, edges: Array, column: Array, legend: bool) -> dict[str, Any]:
    look = STATES[state]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": look.words,
        "legendgroup": state,
        "showlegend": legend,
        "x": moments(edges),
        "y": rounded([*np.round(column, 3), round(float(column[-1]), 3)]),
        "yaxis": axis,
        "stackgroup": axis,
        "line": {"width": 0, "shape": "hv", "color": look.colour},
        "fillcolor": look.colour,
        "fillpattern": look.hatch,
        "hovertemplate": f"{look.words} %{{y:.0%}}<extra></extra>",
    }  # fmt: skip


def _strip_bars(
    strips: dict[str, list[tuple[float, float, str]]], axis: str
) -> list[dict[str, Any]]:
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": STATES[state].words,
            "legendgroup": state,
            "showlegend": False,
            "base": moments([a for a, _, _ in pieces]),
            "x": rounded([b - a for a, b, _ in pieces]),
            "y": [row] * len(pieces),
            "yaxis": axis,
            "marker": {"color": STATES[state].colour, "line": {"width": 1, "color": STATES[state].colour}},
            "text": [f"version {label(key)}" for _, _, key in pieces],
            "textposition": "none",
            "hovertemplate": "%{text}, from %{base:.1f} s<extra></extra>",
        }
        for row, (state, pieces) in enumerate(strips.items())
    ]  # fmt: skip


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
    look = STATES[state]
    return f"The largest wait: {name} {look.words} {100 * share:.0f} % of the time. This shortens it: {look.lifts}."  # fmt: skip
