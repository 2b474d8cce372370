"""Plotly figures as plain dicts, and the blocks of a page around them.

A page is a list of sections, and a section is a list of blocks. The browser draws the blocks. It
writes every text as text, so a text may come from a model. Plotly reads tags in its texts, so
names from a run go through `label`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Block = dict[str, Any]
Array = npt.NDArray[Any]
Rows = Mapping[int, Mapping[str, float | None]]

MAX_POINTS = 800
"""The most points of a curve."""

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, RED, PINK, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY, YELLOW)
"""Colours that colour-blind people can tell apart. Source: Okabe and Ito, 2008."""

AGES = (BLUE, SKY, YELLOW, ORANGE, RED, "#8c3b00", "#4d2000")
"""Colours from fresh to old."""


def label(text: object, limit: int = 60) -> str:
    """Return a text from a run for a figure: short, and without tags."""
    shown = str(text)
    return html.escape(shown if len(shown) <= limit else shown[: limit - 1] + "…", quote=False)


def rounded(values: Any, digits: int = 5) -> list[float | None]:
    """Return numbers with a few digits for JSON. Those that are not finite become None.

    Whole numbers, such as versions and tokens, keep all of their digits.
    """
    return [
        None
        if v is None or not math.isfinite(v)
        else float(v if abs(v) < 2**53 and v == int(v) else f"{v:.{digits}g}")
        for v in (values.tolist() if isinstance(values, np.ndarray) else values)
    ]


def moments(values: Any) -> list[float | None]:
    """Return times of a run for JSON. A part of a long run still has its milliseconds."""
    return rounded(values, 10)


def thinned(x: Sequence[float], y: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """Return at most MAX_POINTS points of a curve, with the least and the largest of each part."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if b is not None and math.isfinite(b)]
    if len(points) > MAX_POINTS:
        kept: set[int] = {0, len(points) - 1}
        for part in np.array_split(np.arange(len(points)), MAX_POINTS // 2 - 1):
            values = [points[i][1] for i in part]
            kept |= {int(part[int(np.argmin(values))]), int(part[int(np.argmax(values))])}
        points = [points[i] for i in sorted(kept)]
    return [a for a, _ in points], [b for _, b in points]


def line(
    name: str, x: Sequence[float], y: Sequence[float | None], colour: str, **more: Any
) -> dict[str, Any]:
    """Return a curve. `more` has further settings of the trace."""
    xs, ys = thinned(x, y)
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers" if len(xs) <= 40 else "lines",
        "name": label(name),
        "x": rounded(xs),
        "y": rounded(ys),
        "line": {"color": colour, "width": 2},
        "marker": {"size": 5},
    }
    line_ = trace["line"] | more.pop("line", {})
    return trace | more | {"line": line_}


def bars(
    at: Any, values: Any, look: dict[str, Any], *, across: bool = False, **more: Any
) -> dict[str, Any]:
    """Return bars of `values` in columns `at`, or in rows. `look` is their marker."""
    if across:
        return {
            "type": "bar",
            "orientation": "h",
            "x": rounded(values),
            "y": at,
            "marker": look,
        } | more
    return {"type": "bar", "x": rounded(at), "y": rounded(values), "marker": look} | more


def area(
    name: str, x: list[float | None], y: Any, colour: str, group: str, **line: Any
) -> dict[str, Any]:
    """Return an area of the stack `group`. `line` has further settings of its upper line."""
    look = {"line": {"width": 0, "color": colour} | line, "fillcolor": colour, "stackgroup": group}
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": rounded(y)} | look


def figure(
    how: str, data: list[dict[str, Any]], height: int = 300, note: str = "", **layout: Any
) -> Block:
    """Return a chart. `how` says how to read it and what to do."""
    block = {"type": "figure", "how": how, "note": note, "height": height}
    return block | {"data": data, "layout": layout}


def axes(y: str, x: str = "version", **more: Any) -> dict[str, Any]:
    """Return both axes by their titles. `more` has further settings of the vertical one."""
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}, **more}}


def table(how: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> Block:
    """Return a table. Numbers stand on the right, and None is empty."""
    return {"type": "table", "how": how, "head": list(head), "rows": [list(row) for row in rows]}


def text(words: str) -> Block:
    """Return a paragraph. Words in backticks are code, and keys among them are links."""
    return {"type": "text", "text": words}


def box(kind: str, title: str, words: str) -> Block:
    """Return a box: `alarm`, `advice` or `good`."""
    return {"type": "box", "kind": kind, "title": title, "text": words}


def section(name: str, title: str, blocks: Sequence[Block]) -> dict[str, Any]:
    return {"id": name, "title": title, "blocks": list(blocks)}


def missing(what: str, why: str) -> Block:
    """Return the paragraph of a section without data."""
    return {"type": "text", "text": f"No {what}: {why}", "kind": "none"}


def number(value: float) -> str:
    """Return a number for people: whole ones with commas, others with four digits."""
    if not math.isfinite(value):
        return str(value)
    whole = value == int(value) or abs(value) >= 10_000
    return f"{value:,.0f}" if whole else f"{value:.4g}"


def seconds(value: float) -> str:
    """Return a duration for people."""
    if value < 120:
        return f"{value:.3g} s"
    hours, rest = divmod(int(value), 3600)
    return f"{hours} h {rest // 60:02} min" if hours else f"{rest // 60} min {rest % 60:02} s"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def by_version(rows: Rows, name: str) -> tuple[list[float], list[float | None]]:
    """Return the versions that have a metric, and its values."""
    found = [(v, row[name]) for v, row in sorted(rows.items()) if row.get(name) is not None]
    return [float(v) for v, _ in found], [value for _, value in found]


def lines(rows: Rows, prefix: str, *looks: tuple[str, str, str]) -> list[dict[str, Any]]:
    """Return a curve for each name, metric after `prefix` and colour, if the rows have it."""
    return [
        line(name, *points, colour)
        for name, key, colour in looks
        if (points := by_version(rows, f"{prefix}{key}"))[0]
    ]


@dataclass(frozen=True, slots=True)
class StateStyle:
    """How charts show a state."""

    words: str
    colour: str
    pattern: str = ""
    lifts: str = ""
    """What shortens it, with the keys."""

    @property
    def hatch(self) -> dict[str, object]:
        """Return the pattern of a wait for Plotly."""
        if not self.pattern:
            return {}
        return {"shape": self.pattern, "size": 6, "solidity": 0.3, "fillmode": "overlay", "fgcolor": "#ffffff"}  # fmt: skip

    @property
    def waits(self) -> bool:
        return bool(self.pattern)


STATES = {
    "train": StateStyle("trains", BLUE, "", "`actor.ppo_max_token_len_per_gpu`, or more trainer devices"),
    "generate": StateStyle("draws responses", GREEN, "", "more rollout devices"),
    "validate": StateStyle("validates", SKY, "", "`trainer.test_freq`, `rollout.test_freq`"),
    "sync": StateStyle("syncs weights", PINK, "", "`async_training.trigger_parameter_sync_step`, `async_training.overlap_sync`"),
    "save": StateStyle("saves a checkpoint", "#666666", "", "`trainer.save_freq`, `trainer.async_save`"),
    "switch": StateStyle("changes hands", YELLOW, "", "`async_training.trigger_parameter_sync_step`"),
    "wait_trajectories": StateStyle("waits for responses", ORANGE, "/", "`async_training.staleness_threshold`, or more rollout devices"),
    "wait_rewards": StateStyle("waits for rewards", YELLOW, "/", "`reward.num_workers`"),
    "wait_teachers": StateStyle("waits for teachers", YELLOW, ".", "`teachers.NAME.max_concurrency`, or a faster server"),
    "wait_tools": StateStyle("waits for tools", YELLOW, "x", "`async_training.staleness_threshold`: more sessions at once"),
    "wait_trainer": StateStyle("waits for the trainer", RED, "/", "more trainer devices, or `async_training.staleness_threshold`"),
    "wait_sync": StateStyle("waits for a sync", PINK, "/", "`async_training.trigger_parameter_sync_step`, `async_training.on_sync`"),
    "wait_validation": StateStyle("waits for a validation", SKY, "/", "`trainer.test_freq`, `rollout.test_freq`"),
    "tail": StateStyle("waits: the run ends", GREY, "/", "nothing: no more samples are needed"),
    "other": StateStyle("other", "#BBBBBB", "", ""),
}  # fmt: skip
"""The states of a device in charts. One that waits has a pattern."""

_OF: dict[str, str] = {
    **dict.fromkeys(
        ("train", "old_log_prob", "ref", "values", "teacher", "adv", "update_critic", "update_actor", "train_other"),
        "train",
    ),
    **dict.fromkeys(("sync_keep", "sync_transfer", "sync_activate"), "sync"),
    **dict.fromkeys(("wait_samples", "wait_prev_gen"), "wait_trajectories"),
    **dict.fromkeys(("wait_rollouts", "wait_publish"), "wait_sync"),
    "save_checkpoint": "save",
    "user_metrics": "other",
}  # fmt: skip


PARTS = {*_OF, "train", "switch", "wait_validation", "other"}
"""The parts of the trainer's time. Its track has other spans too."""


def state_of(part: str) -> str:
    """Return the state of charts for a part of the trainer's time or a state of the accounts."""
    return _OF.get(part, part if part in STATES else "other")
