"""The comparison of several runs on one page."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from millrace.persist.run_reader import RunReader
from millrace.report.page import figures as fig
from millrace.report.page import head, totals
from millrace.report.page.figures import (
    STATES,
    Block,
    axes,
    by_version,
    number,
    section,
    share,
    table,
)

_MOST_METRICS = 4


def of_runs(runs: list[RunReader]) -> dict[str, Any]:
    """Return the page that compares runs. Folders with equal names get their parents' too."""
    short = [run.name for run in runs]
    names = [
        f"{run.path.resolve().parent.name}/{name}" if short.count(name) > 1 else name
        for run, name in zip(runs, short, strict=True)
    ]
    first: list[Block] = []
    if len(runs) > (most := len(fig.PALETTE)):
        first = [fig.text(f"Curves show the first {most} of {len(runs)} runs. Tables have all.")]
    damage = [
        fig.text(f"Not readable in {name}: {note}")
        for run, name in zip(runs, names, strict=True)
        for note in run.notes
    ]
    speed = _chart(
        *(runs, names),
        "Trained samples per second by version. Compare the level after the first versions. If a "
        "curve has deep dips, look at the timeline of that run: `millrace report RUN`.",
        _metric("perf/samples_per_s"),
        "samples/s",
        what="speed",
        why="no version was trained yet.",
        rangemode="tozero",
    )
    staleness = _chart(
        *(runs, names),
        "Mean age of the trained tokens in versions. Less is more on-policy; "
        "`async_training.staleness_threshold` bounds it.",
        _metric("staleness/token_mean"),
        "versions",
        what="staleness",
        rangemode="tozero",
    )
    whole = [*first, _overview(runs, names), *damage, _differences(runs, names)]
    return {
        "title": "comparison of " + ", ".join(names),
        "keys": {},
        "sections": [
            section("runs", "The runs", whole),
            section("learning", "Learning", _learning(runs, names)),
            section("speed", "Speed", [speed]),
            section("devices", "Where the time went", [_devices(runs, names)]),
            section("tokens", "Where the tokens went", [_tokens(runs, names)]),
            section("staleness", "Staleness", [staleness]),
        ],
    }


def _overview(runs: list[RunReader], names: list[str]) -> Block:
    def last(rows: fig.Rows, name: str) -> str:
        values = by_version(rows, name)[1]
        return "" if not values or values[-1] is None else number(values[-1])

    def mean(
        run: RunReader,
        name: str,
        weight: str = "timing_s/step",
        show: Callable[[float], str] = number,
    ) -> str:
        """Return the mean over the time of the versions: a slow version counts for longer."""
        rows = [(row[name], row.get(weight, 0.0)) for row in run.rows.values() if name in row]
        rows = rows if any(w for _, w in rows) else [(v, 1.0) for v, _ in rows]
        whole = sum(w for _, w in rows)
        return show(sum(v * w for v, w in rows) / whole) if whole else ""

    def idle(run: RunReader, side: str) -> str:
        return mean(run, f"{side}/idle_ratio", show=lambda value: share(value, 1.0))

    figures: dict[str, Callable[[RunReader], object]] = {
        "mode": head.mode_of,
        "state": head.state_of,
        "versions": lambda run: run.versions,
        "seconds of RL": lambda run: number(head.run_seconds(run)),
        "last mean reward": lambda run: last(run.rows, "reward/mean"),
        "samples/s of all versions": lambda run: mean(run, "perf/samples_per_s"),
        "trainer waits, mean over time": lambda run: idle(run, "trainer"),
        "free decode slots, mean over time": lambda run: idle(run, "rollouter"),
        "age of tokens, mean": lambda run: mean(run, "staleness/token_mean", "train/tokens"),
        "alarms": lambda run: ", ".join(sorted(alarm.name for alarm in run.alarms())) or "none",
    }
    rows = [[name, *map(of, runs)] for name, of in figures.items()]
    for metric in _validations(runs):
        row = [last(run.validations, metric) for run in runs]
        rows.append([f"last {metric.removeprefix('val/')}", *row])
    return table("", ["", *names], rows)


def _validations(runs: list[RunReader]) -> list[str]:
    """Return the metrics of validation that most runs have, without components."""
    counts = Counter(
        name
        for run in runs
        for name in {name for row in run.validations.values() for name in row}
        if name.count("/") == 2
    )
    return sorted(counts, key=lambda name: (-counts[name], name))[:_MOST_METRICS]


def _differences(runs: list[RunReader], names: list[str]) -> Block:
    configs = [run.keys() for run in runs]
    keys = sorted({key for config in configs for key in config})
    rows = [
        [key, *(config.get(key, "") for config in configs)]
        for key in keys
        if len({config.get(key) for config in configs}) > 1 and key != "trainer.run_dir"
    ]
    if not rows:
        return fig.text("Every key of the configuration has the same value in all runs.")
    return table("Keys of the configuration that differ.", ["key", *names], rows[:200])


Points = Callable[[RunReader], tuple[list[float], list[float | None]]]


def _metric(name: str) -> Points:
    return lambda run: by_version(run.rows, name)


def _chart(
    runs: list[RunReader],
    names: list[str],
    how: str,
    points: Points,
    y: str = "reward",
    x: str = "version",
    *,
    what: str = "",
    why: str = "no run has it yet.",
    **axis: Any,
) -> Block:
    """Return a curve for each run. Without any, say that there is no `what`, and why."""
    data = [
        fig.line(name, *found, colour)
        for run, name, colour in zip(runs, names, fig.PALETTE, strict=False)
        if (found := points(run))[0]
    ]
    if not data:
        return fig.missing(what or y, why)
    return fig.figure(how, data, **axes(fig.label(y), x, **axis))


def _reward_over_time(run: RunReader) -> tuple[list[float], list[float | None]]:
    """Return the reward over the seconds of training until its version."""
    rows = [row for _, row in sorted(run.rows.items())]
    ends = itertools.accumulate(row.get("timing_s/step", 0.0) for row in rows)
    found = [
        (x, row["reward/mean"]) for x, row in zip(ends, rows, strict=True) if "reward/mean" in row
    ]
    return [x for x, _ in found], [y for _, y in found]


def _learning(runs: list[RunReader], names: list[str]) -> list[Block]:
    blocks = [
        _chart(
            *(runs, names),
            "Mean reward of the trained responses by version. Runs with the same data and reward "
            "can be compared, others cannot.",
            _metric("reward/mean"),
        ),
        _chart(
            *(runs, names),
            "The same over the trainer's seconds. The higher curve learns faster on these devices: "
            "take its `mode` and its numbers.",
            _reward_over_time,
            x="seconds of RL",
        ),
    ]
    for metric in _validations(runs):
        short = metric.removeprefix("val/")
        how = (
            f"Validation {short} by version. It counts more than the reward, because no run "
            "was trained on these problems."
        )

        def validated(run: RunReader, metric: str = metric) -> Any:
            return by_version(run.validations, metric)

        blocks.append(_chart(runs, names, how, validated, short))
    return blocks


def _devices(runs: list[RunReader], names: list[str]) -> Block:
    columns = [_shares(run) for run in runs]
    keys = sorted({key for column in columns for key in column})
    if not keys:
        return fig.missing("accounts of time", "no run has accounts.jsonl.")
    rows = [[key, *(share(c[key], 1) if key in c else "" for c in columns)] for key in keys]
    how = (
        "Share of the time of each side's devices. A larger wait in one run shows what its mode "
        "costs."
    )
    return table(how, ["device and state", *names], rows)


def _shares(run: RunReader) -> dict[str, float]:
    """Return the share of the time of each side's devices by state."""
    sides: defaultdict[str, totals.Seconds] = defaultdict(totals.Seconds)
    for name, track in totals.device_seconds(run.accounts).items():
        sides[name.partition("-")[0]].update(track.all)
    return {
        f"{side} {STATES[state].words}": value / whole
        for side, parts in sides.items()
        if (whole := sum(parts.values()))
        for state, value in totals.by_state(parts).items()
        if value > 1e-6 * whole
    }


def _tokens(runs: list[RunReader], names: list[str]) -> Block:
    last = [run.accounts[-1] if run.accounts else None for run in runs]
    buckets = sorted({name for line in last if line for name in line.tokens})
    if not buckets:
        return fig.missing("accounts of tokens", "no run has accounts.jsonl.")
    rows: list[list[object]] = [
        [bucket, *(share(line.tokens.get(bucket, 0), line.generated) if line else "" for line in last)]
        for bucket in buckets
    ]  # fmt: skip
    rows.append(["generated tokens", *(line.generated if line else "" for line in last)])
    return table("Share of all drawn tokens in each bucket.", ["bucket", *names], rows)
