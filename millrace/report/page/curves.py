"""The curves of a report by version: rewards, validation, staleness, lengths, syncs, agents."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from millrace.persist.run_reader import RunReader
from millrace.report.page import figures as fig
from millrace.report.page.figures import Array, Block, axes, figure, line, number, rounded

_MOST_CURVES = 8
_MOST_BARS = 200
"""The most bars of a chart by version."""
_BARS = 40
"""The most bars of a histogram, or one more."""


def rewards(run: RunReader) -> Block:
    """Return the curve of the reward, with its spread and its components."""
    x, mean = fig.by_version(run.rows, "reward/mean")
    if not x:
        return fig.missing("rewards", "no version was trained yet.")
    data = []
    std = dict(zip(*fig.by_version(run.rows, "reward/std"), strict=True))
    if len(x) <= fig.MAX_POINTS and all(v in std for v in x):
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
    data.append(line("mean reward", x, mean, fig.BLUE))
    names = sorted(
        {n for row in run.rows.values() for n in row if re.fullmatch(r"reward/.+/mean", n)}
    )
    for name, colour in zip(names[:_MOST_CURVES], fig.PALETTE[1:] * 2, strict=False):
        short = name.removeprefix("reward/").removesuffix("/mean")
        data.append(
            line(short, *fig.by_version(run.rows, name), colour, line={"dash": "dot", "width": 1.5})
        )
    how = (
        "The mean reward of the trained responses should rise. If the band has no width, all "
        "responses get the same reward and nothing is learned: check `reward.function` and "
        "`data.train_files`. If it rises and then falls, lower `actor.optim.lr`."
    )
    return figure(how, data, note=_more(names, "components"), **axes("reward"))


def validation(run: RunReader) -> Block:
    """Return the curves of the validation metrics."""
    names = sorted({name for row in run.validations.values() for name in row})
    scores = [n for n in names if not n.endswith("/reward_errors")]
    if not scores:
        return fig.missing(
            "validation", "`data.val_files` is empty, or no validation has ended yet."
        )
    # The metrics of a source, without its components, come first.
    scores.sort(key=lambda name: (name.count("/"), name))
    data = [
        line(name.removeprefix("val/"), *fig.by_version(run.validations, name), colour, mode="lines+markers")
        for name, colour in zip(scores[:_MOST_CURVES], fig.PALETTE, strict=False)
    ]  # fmt: skip
    how = (
        "Scores on held-out problems. If they stand still while the reward above rises, the "
        "policy learns the training problems or a fault of the reward: read the samples below. "
        "`trainer.test_freq` and `rollout.test_freq` set how often they are measured."
    )
    return figure(how, data, note=_more(scores, "metrics"), **axes("score"))


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
        return fig.missing("staleness", "no version was trained yet.")
    versions = sorted(run.rows)
    counts = np.array([[run.rows[v].get(f"{start}{age}", 0.0) for age in ages] for v in versions])
    step = max(1, -(-len(versions) // _MOST_BARS))
    counts = np.add.reduceat(counts, np.arange(0, len(versions), step))
    total = counts.sum(axis=1, keepdims=True)
    shares = 100 * np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
    if len(ages) > 7:  # The last band has all older tokens.
        shares = np.column_stack([shares[:, :6], shares[:, 6:].sum(axis=1)])
    names = [f"{age} version{'s' * (age != 1)} old" for age in ages[: shares.shape[1]]]
    if len(ages) > 7:
        names[-1] = f"{ages[6]} and older"
    data = [
        fig.bars(versions[::step], column, {"color": colour, "line": {"width": 0}}, name=name)
        for name, colour, column in zip(names, fig.AGES, shares.T, strict=False)
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
    layout: dict[str, Any] = {"barmode": "stack", "bargap": 0, "legend": {"traceorder": "normal"}}
    return figure(how, data, note=note, **layout, **axes("% of tokens", range=[0, 100]))


def length_curves(run: RunReader) -> Block:
    """Return the percentiles of the trained lengths by version."""
    looks = ("99 %", "p99", fig.RED), ("90 %", "p90", fig.ORANGE), ("mean", "mean", fig.BLUE)
    data = fig.lines(run.rows, "response_length/", *looks, ("half", "p50", fig.SKY))
    if not data:
        return fig.missing("lengths by version", "no version was trained yet.")
    clip = fig.by_version(run.rows, "response_length/clip_ratio")[1]
    last = clip[-1] if clip and clip[-1] is not None else 0.0
    cut = (
        f"In the last version the limit cut {100 * last:.1f} % of them. If that is much, raise "
        "`rollout.max_response_length`. If lengths grow without a gain of reward, look at "
        "`actor.loss_agg_mode`."
    )
    if run.key("rollout.drawn_lengths.enable"):
        cut = "`rollout.drawn_lengths.enable` cuts each response at a length that was drawn for it."
    how = f"Tokens of the trained responses: this share of them is shorter than the curve. {cut}"
    return figure(how, data, **axes("tokens", rangemode="tozero"))


def lengths(all_tokens: Array, trained: Array, source: str) -> Block:
    """Return the histogram of the lengths of trained responses against all finished ones.

    `source` says what all of them are. Without it they are too few to compare.
    """
    if not len(all_tokens):
        return fig.missing("lengths", "no sample was kept, see `report.samples`.")
    # Each bar is a whole number of tokens. The last one has the longest responses too.
    top = math.ceil(np.percentile(all_tokens, 99.5))
    step = top // _BARS + 1
    bins = step * np.arange(top // step + 2) - 0.5
    data = []
    for name, values, colour, pattern in (
        ("all that ended", all_tokens, fig.GREY, ""),
        ("trained", trained, fig.GREEN, "/"),
    ):
        heights, _ = np.histogram(np.minimum(values, top), bins)
        middles, shares = (bins[1:] + bins[:-1]) / 2, 100 * heights / max(len(values), 1)
        look = {"color": colour, "pattern": {"shape": pattern}}
        data.append(fig.bars(middles, shares, look, name=name, opacity=0.75))
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
    titles = axes("% of responses", "tokens of a response")
    return figure(how, data, 260, barmode="overlay", bargap=0, **titles)


def syncs(run: RunReader) -> Block:
    """Return the seconds of each sync: transfer, pause and hold."""
    data = fig.lines(
        run.rows,
        "sync/",
        ("transfer: rollouts continue", "transfer_s", fig.SKY),
        ("hold: rollouts are asked to pause until they continue", "hold_s", fig.ORANGE),
        ("pause: a replica changes its weights", "pause_s", fig.RED),
    )
    if not data:
        return fig.missing("syncs", "no version was synced yet.")
    sizes = fig.by_version(run.rows, "sync/bytes")[1]
    size = (sizes[-1] or 0) / 1e6 if sizes else 0
    how = (
        f"Seconds of each weight sync ({number(size)} MB to a replica). A long hold with a short "
        "pause means that rollouts wait for running responses: `async_training.on_sync` = "
        "interrupt or swap. If the transfer is long, set `async_training.overlap_sync=true`, or "
        "sync less often with `async_training.trigger_parameter_sync_step`."
    )
    return figure(how, data, 260, **axes("seconds", rangemode="tozero"))


_ENDED = "agents/ended/"
_OWN = ("turns/", "threads/", "context_tokens/", "ended/", "dead_turns")
_SESSIONS = {"drawing": ("draw", fig.GREEN), "waiting": ("wait for a tool", fig.YELLOW), "at_gate": ("wait for a pause to end", fig.GREY)}  # fmt: skip


def agents(run: RunReader) -> list[Block]:
    """Return the charts of episodes. They are empty in a run without agents."""
    charts = (_turns, _ended, _sessions, _counts) if run.agents else ()
    return [block for chart in charts if (block := chart(run)) is not None]


def _turns(run: RunReader) -> Block | None:
    many = any(row.get("agents/threads/max", 0.0) > 1 for row in run.rows.values())
    looks = [("turns, mean", "turns/mean", fig.BLUE), ("turns, most", "turns/max", fig.GREEN)]
    if many:
        looks.append(("threads, mean", "threads/mean", fig.ORANGE))
        looks.append(("threads, most", "threads/max", fig.RED))
    data = fig.lines(run.rows, "agents/", *looks)
    if not data:
        return None
    dead = sum(row.get("agents/dead_turns", 0.0) for row in run.rows.values())
    how = (
        "Trained turns and threads of an episode. A new thread begins if the history does not "
        "only grow: see `agents.history`. "
        if many
        else "Trained turns of an episode. Each has one thread: its history only grew. "
    ) + (
        f"{number(dead)} turns were dead: nobody received them, or another draw replaced them."
        if dead
        else "No turn was dead."
    )
    return figure(how, data, 260, xaxis=axes("")["xaxis"], yaxis={"rangemode": "tozero"})


def _ended(run: RunReader) -> Block | None:
    names = sorted({n for row in run.rows.values() for n in row if n.startswith(_ENDED)})
    if not names:
        return None
    names.sort(key=lambda name: name != f"{_ENDED}done")
    colours = (fig.GREEN, fig.ORANGE, fig.BLUE, fig.PINK, fig.SKY, fig.RED, fig.YELLOW)
    looks = [
        (n, fig.label(n.removeprefix(_ENDED)), c) for n, c in zip(names, colours, strict=False)
    ]
    data = _stacked(run, looks, 100)
    how = (
        "How the episodes ended. `done` is the agent's own end; the others are limits: "
        "`agents.max_turns` for turns, `agents.max_episode_tokens` and `agents.max_tokens_per_turn` "
        "for tokens, `rollout.max_response_length` for context."
    )
    return figure(how, data, 260, **axes("% of episodes", range=[0, 100]))


def _sessions(run: RunReader) -> Block | None:
    found = [(f"agents/{name}", *look) for name, look in _SESSIONS.items()]
    data = _stacked(run, found, 1)
    if not data:
        return None
    how = (
        "Sessions on average. One that waits for a tool has no decode slot. If most of them wait "
        "and replicas are idle, more sessions fill them: `async_training.staleness_threshold`."
    )
    return figure(how, data, 260, **axes("sessions"))


def _stacked(
    run: RunReader, found: list[tuple[str, str, str]], factor: float
) -> list[dict[str, Any]]:
    """Return stacked areas by version. A version that lacks a figure has 0 of it."""
    versions = [v for v in sorted(run.rows) if any(name in run.rows[v] for name, *_ in found)]
    versions = versions[:: max(1, len(versions) // 400)]
    return [
        fig.area(shown, rounded(versions), values, colour, "one")
        for name, shown, colour in found
        if any(values := [factor * run.rows[v].get(name, 0.0) for v in versions])
    ]


def _counts(run: RunReader) -> Block | None:
    """Return the sums of what agents count themselves, such as the calls of each tool."""
    live = {f"agents/{name}" for name in _SESSIONS}
    sums: dict[str, float] = {}
    for row in run.rows.values():
        for name, value in row.items():
            short = name.removeprefix("agents/")
            if short != name and name not in live and not short.startswith(_OWN):
                sums[short] = sums.get(short, 0.0) + value
    if not sums:
        return None
    rows = [[name, number(value)] for name, value in sorted(sums.items())[:100]]
    return fig.table("Counts of all trained episodes.", ["count", "sum"], rows)
