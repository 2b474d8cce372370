"""Windows of the timeline: the steady state and the slowest version, with every single span."""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.report.page.figures import Array, Block, figure, label, moments, rounded, seconds
from millrace.report.page.lanes import NAMES, Lane, Spans
from millrace.report.page.states import STATES

MOST_SPANS = 1500
"""The most requests of a window."""


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
        note = f"Cut after {sum(map(len, chosen.values()))} requests; the files in RUN/trace/ have more for Perfetto. "  # fmt: skip
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
    marks = [(at, key) for _, at, key in spans.marks.get("sync activate", []) if begin <= at <= end]
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "xaxis": {"title": {"text": "seconds of RL"}, "range": moments([begin, end])},
        "yaxis": {
            "tickvals": [top + 0.15 for top in tops[:-1]],
            "ticktext": [label(lane.name, 14) for lane in lanes],
            "range": [tops[-1], -0.05],
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
        },
        "shapes": [
            {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 1, "dash": "dot", "color": "#888"}}
            for x, _ in marks[:30]
        ],
        "annotations": [
            {"x": x, "y": 1, "yref": "paper", "yanchor": "bottom", "text": f"v{label(key, 8)}", "showarrow": False, "font": {"size": 10}}
            for x, key in marks[:30]
        ],
    }  # fmt: skip
    how = (
        f"{title}: {seconds(end - begin)}. The thick bar is the device's state, a thin line is one "
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
        for start, stop, state in zip(
            lane.starts[inside], lane.ends[inside], lane.states[inside], strict=True
        ):
            a, b = max(float(start), begin), min(float(stop), end)
            pieces.setdefault(int(state), []).append((a, b - a, top + 0.15))
    data = []
    for state, found in sorted(pieces.items()):
        look = STATES[NAMES[state]]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": look.words,
                "base": moments([a for a, _, _ in found[:2000]]),
                "x": rounded([w for _, w, _ in found[:2000]]),
                "y": [y for _, _, y in found[:2000]],
                "width": 0.26,
                "marker": {"color": look.colour, "pattern": look.hatch, "line": {"width": 0}},
                "hovertemplate": f"{look.words} %{{x:.3f}} s<extra></extra>",
            }
        )  # fmt: skip
    return data


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
        n = int(mine.sum())
        x = np.column_stack([np.clip(rows[mine, 0], begin, end), np.clip(rows[mine, 1], begin, end), np.full(n, np.nan)])  # fmt: skip
        y = top + 0.34 + height * (places[mine] + 0.5)
        look = STATES[state]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": look.words,
                "showlegend": False,
                "x": moments(x.ravel()),
                "y": rounded(np.column_stack([y, y, np.full(n, np.nan)]).ravel()),
                "line": {"color": look.colour, "width": max(1, min(5, round(50 * height)))},
                "hoverinfo": "x",
            }
        )
    return data
