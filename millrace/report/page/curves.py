"""The curves of a report: rewards, validation, staleness, lengths and syncs, by version."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from millrace.persist.run_reader import RunReader
from millrace.report.page.figures import (
    AGES,
    BLUE,
    GREEN,
    GREY,
    MAX_POINTS,
    ORANGE,
    PALETTE,
    RED,
    SKY,
    Array,
    Block,
    by_version,
    figure,
    line,
    missing,
    number,
    rounded,
)

_VERSION = {"title": {"text": "version"}}
_MOST_CURVES = 8


def rewards(run: RunReader) -> Block:
    """Return the curve of the reward, with its spread and its components."""
    x, mean = by_version(run.rows, "reward/mean")
    if not x:
        return missing("rewards", "no version was trained yet.")
    data = []
    std = dict(zip(*by_version(run.rows, "reward/std"), strict=True))
    if len(x) <= MAX_POINTS and all(v in std for v in x):
        high = [(m or 0) + (std[v] or 0) for v, m in zip(x, mean, strict=True)]
        low = [(m or 0) - (std[v] or 0) for v, m in zip(x, mean, strict=True)]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "mean ± standard deviation",
                "x": rounded([*x, *reversed(x)]),
                "y": rounded([*high, *reversed(low)]),
                "fill": "toself",
                "fillcolor": "rgba(0,114,178,0.15)",
                "line": {"width": 0},
                "hoverinfo": "skip",
            }
        )
    data.append(line("mean reward", x, mean, BLUE))
    names = sorted(
        {n for row in run.rows.values() for n in row if re.fullmatch(r"reward/.+/mean", n)}
    )
    for name, colour in zip(names[:_MOST_CURVES], PALETTE[1:] * 2, strict=False):
        short = name.removeprefix("reward/").removesuffix("/mean")
        data.append(
            line(short, *by_version(run.rows, name), colour, line={"dash": "dot", "width": 1.5})
        )
    how = (
        "The mean reward of the trained responses should rise. If the band has no width, all "
        "responses get the same reward and nothing is learned: check `reward.function` and "
        "`data.train_files`. If it rises and then falls, lower `actor.optim.lr`."
    )
    note = _more(names, "components")
    return figure(how, data, note=note, xaxis=_VERSION, yaxis={"title": {"text": "reward"}})


def validation(run: RunReader) -> Block:
    """Return the curves of the validation metrics."""
    names = sorted({name for row in run.validations.values() for name in row})
    scores = [n for n in names if not n.endswith("/reward_errors")]
    if not scores:
        return missing("validation", "`data.val_files` is empty, or no validation has ended yet.")
    # The metrics of a source, without its components, come first.
    scores.sort(key=lambda name: (name.count("/"), name))
    data = [
        line(name.removeprefix("val/"), *by_version(run.validations, name), colour, mode="lines+markers")
        for name, colour in zip(scores[:_MOST_CURVES], PALETTE, strict=False)
    ]  # fmt: skip
    how = (
        "Scores on held-out problems. If they stand still while the reward above rises, the "
        "policy learns the training problems or a fault of the reward: read the samples below. "
        "`trainer.test_freq` and `rollout.test_freq` set how often they are measured."
    )
    return figure(how, data, note=_more(scores, "metrics"), xaxis=_VERSION, yaxis={"title": {"text": "score"}})  # fmt: skip


def _more(names: list[str], what: str) -> str:
    if len(names) <= _MOST_CURVES:
        return ""
    return f"{_MOST_CURVES} of {len(names)} {what} are shown. metrics.jsonl has all of them."


def staleness(run: RunReader) -> Block:
    """Return the trained tokens of each age, stacked by version."""
    start = "staleness/token_hist/"
    ages = sorted(
        {
            int(name.removeprefix(start))
            for row in run.rows.values()
            for name in row
            if re.fullmatch(r"[0-9]{1,6}", name.removeprefix(start)) and name.startswith(start)
        }
    )
    if not ages:
        return missing("staleness", "no version was trained yet.")
    versions = sorted(run.rows)
    counts = np.array([[run.rows[v].get(f"{start}{age}", 0.0) for age in ages] for v in versions])
    counts, edges, step = _binned(counts, versions)
    total = counts.sum(axis=1, keepdims=True)
    shares = 100 * np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
    if len(ages) > 7:  # The last band has all older tokens.
        shares = np.column_stack([shares[:, :6], shares[:, 6:].sum(axis=1)])
    names = [f"{age} version{'s' * (age != 1)} old" for age in ages[: shares.shape[1]]]
    if len(ages) > 7:
        names[-1] = f"{ages[6]} and older"
    data = [
        {
            "type": "bar",
            "name": name,
            "x": rounded(edges),
            "y": rounded(shares[:, i]),
            "marker": {"color": colour, "line": {"width": 0}},
        }
        for i, (name, colour) in enumerate(zip(names, AGES, strict=False))
    ]
    mean = float((counts * np.array(ages)).sum() / max(counts.sum(), 1))
    bound = run.key("async_training.staleness_threshold")
    how = (
        f"The share of trained tokens by age in versions; the mean age is {mean:.2f}. Old tokens "
        "make training off-policy: see rollout_corr/rollout_is_eff_sample_size in the metrics. "
        f"Lower `async_training.staleness_threshold`{f' (now {bound})' if bound is not None else ''} "
        "or `async_training.trigger_parameter_sync_step` for fresher tokens. Raise the first "
        "if rollouts are idle."
    )
    note = f"Each bar is {step} versions." if step > 1 else ""
    layout: dict[str, Any] = {"barmode": "stack", "bargap": 0, "legend": {"traceorder": "normal"}, "yaxis": {"title": {"text": "% of tokens"}, "range": [0, 100]}}  # fmt: skip
    return figure(how, data, note=note, xaxis=_VERSION, **layout)


def _binned(counts: Array, versions: list[int], most: int = 200) -> tuple[Array, list[float], int]:
    """Return the sums of at most `most` bins of versions, their places and their size."""
    step = -(-len(versions) // most)
    if step <= 1:
        return counts, [float(v) for v in versions], 1
    starts = np.arange(0, len(versions), step)
    return np.add.reduceat(counts, starts), [float(versions[i]) for i in starts], step


def length_curves(run: RunReader) -> Block:
    """Return the percentiles of the trained lengths by version."""
    found = [
        (name, colour, by_version(run.rows, f"response_length/{key}"))
        for name, key, colour in (
            ("99 %", "p99", RED), ("90 %", "p90", ORANGE), ("mean", "mean", BLUE), ("half", "p50", SKY),
        )
    ]  # fmt: skip
    data = [line(name, *points, colour) for name, colour, points in found if points[0]]
    if not data:
        return missing("lengths by version", "no version was trained yet.")
    clip = by_version(run.rows, "response_length/clip_ratio")[1]
    last = clip[-1] if clip and clip[-1] is not None else 0.0
    cut = (
        f"In the last version the limit cut {100 * last:.1f} % of them. If that is much, raise "
        "`rollout.max_response_length`. If lengths grow without a gain of reward, look at "
        "`actor.loss_agg_mode`."
    )
    if run.key("rollout.drawn_lengths.enable"):
        cut = "`rollout.drawn_lengths.enable` cuts each response at a length that was drawn for it."
    how = f"Tokens of the trained responses: this share of them is shorter than the curve. {cut}"
    return figure(how, data, xaxis=_VERSION, yaxis={"title": {"text": "tokens"}, "rangemode": "tozero"})  # fmt: skip


_BARS = 40
"""The most bars of a histogram, or one more."""


def lengths(all_tokens: Array, trained: Array, source: str) -> Block:
    """Return the histogram of the lengths of trained responses against all finished ones.

    `source` says what all of them are. Without it they are too few to compare.
    """
    if not len(all_tokens):
        return missing("lengths", "no sample was kept, see `report.samples`.")
    # Each bar is a whole number of tokens. The last one has the longest responses too.
    top = math.ceil(np.percentile(all_tokens, 99.5))
    step = top // _BARS + 1
    bins = step * np.arange(top // step + 2) - 0.5
    data = []
    for name, values, colour, pattern in (
        ("all that ended", all_tokens, GREY, ""),
        ("trained", trained, GREEN, "/"),
    ):
        heights, _ = np.histogram(np.minimum(values, top), bins)
        data.append(
            {
                "type": "bar",
                "name": name,
                "x": rounded((bins[1:] + bins[:-1]) / 2),
                "y": rounded(100 * heights / max(len(values), 1)),
                "marker": {"color": colour, "pattern": {"shape": pattern}},
                "opacity": 0.75,
            }
        )
    both = all_tokens.mean(), trained.mean() if len(trained) else 0.0
    bias = (both[1] / both[0] - 1) if both[0] else 0.0
    how = (
        f"Lengths of trained responses (mean {number(both[1])}) against {source} "
        f"(mean {number(both[0])}): {100 * bias:+.1f} %. "
        + (
            "The two agree, so no length is favoured."
            if abs(bias) < 0.05
            else "They differ, so training prefers some lengths: look at the dropped samples below, "
            "`algorithm.filter_groups.enable` and `reward.timeout_s`."
        )
    )
    if not source:
        how = (
            "Lengths of some trained responses against some that ended. The trace of a fast run has "
            "too few for a verdict. Set `report.samples=1` to have all, or `report.trace_load=1`."
        )
    layout: dict[str, Any] = {"barmode": "overlay", "bargap": 0}
    return figure(how, data, 260, xaxis={"title": {"text": "tokens of a response"}}, yaxis={"title": {"text": "% of responses"}}, **layout)  # fmt: skip


def syncs(run: RunReader) -> Block:
    """Return the seconds of each sync: transfer, pause and hold."""
    data = [
        line(name, *points, colour)
        for name, key, colour in (
            ("transfer: rollouts continue", "transfer_s", SKY),
            ("hold: rollouts are asked to pause until they continue", "hold_s", ORANGE),
            ("pause: a replica changes its weights", "pause_s", RED),
        )
        if (points := by_version(run.rows, f"sync/{key}"))[0]
    ]
    if not data:
        return missing("syncs", "no version was synced yet.")
    sizes = by_version(run.rows, "sync/bytes")[1]
    size = (sizes[-1] or 0) / 1e6 if sizes else 0
    how = (
        f"Seconds of each weight sync ({number(size)} MB to a replica). A long hold with a short "
        "pause means that rollouts wait for running responses: `async_training.on_sync` = "
        "interrupt or swap. If the transfer is long, set `async_training.overlap_sync=true`, or "
        "sync less often with `async_training.trigger_parameter_sync_step`."
    )
    return figure(how, data, height=260, xaxis=_VERSION, yaxis={"title": {"text": "seconds"}, "rangemode": "tozero"})  # fmt: skip
