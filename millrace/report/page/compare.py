"""The comparison of several runs on one page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace.persist.run_reader import RunReader
from millrace.report.page import head, totals
from millrace.report.page.figures import (
    PALETTE,
    Block,
    by_version,
    figure,
    label,
    line,
    missing,
    number,
    section,
    share,
    table,
    text,
)
from millrace.report.page.states import STATES, state_of

_MOST_METRICS = 4


def of_runs(runs: list[RunReader]) -> dict[str, Any]:
    """Return the page that compares runs."""
    names = _names(runs)
    return {
        "title": "comparison of " + ", ".join(names),
        "keys": {},
        "sections": [
            section(
                "runs",
                "The runs",
                [
                    *_first(runs),
                    _overview(runs, names),
                    *_damage(runs, names),
                    _differences(runs, names),
                ],
            ),
            section("learning", "Learning", _learning(runs, names)),
            section("speed", "Speed", _speed(runs, names)),
            section("devices", "Where the time went", [_devices(runs, names)]),
            section("tokens", "Where the tokens went", [_tokens(runs, names)]),
            section("staleness", "Staleness", [_staleness(runs, names)]),
        ],
    }


def _first(runs: list[RunReader]) -> list[Block]:
    if len(runs) <= len(PALETTE):
        return []
    return [text(f"Curves show the first {len(PALETTE)} of {len(runs)} runs. Tables have all.")]


def _damage(runs: list[RunReader], names: list[str]) -> list[Block]:
    """Return what could not be read of each run, so that no gap looks like a result."""
    return [
        text(f"Not readable in {name}: {note}")
        for run, name in zip(runs, names, strict=True)
        for note in run.notes
    ]


def _names(runs: list[RunReader]) -> list[str]:
    """Return a short name for each run. Folders with equal names get their parents' too."""
    names = [run.name for run in runs]
    return [
        f"{run.path.resolve().parent.name}/{name}" if names.count(name) > 1 else name
        for run, name in zip(runs, names, strict=True)
    ]


def _overview(runs: list[RunReader], names: list[str]) -> Block:
    def last(run: RunReader, name: str) -> str:
        values = by_version(run.rows, name)[1]
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

    def part(value: float) -> str:
        return share(value, 1.0)

    rows: list[list[object]] = [
        ["mode", *map(head.mode_of, runs)],
        ["state", *map(head.state_of, runs)],
        ["versions", *(run.versions for run in runs)],
        ["seconds of RL", *(number(head.run_seconds(run)) for run in runs)],
        ["last mean reward", *(last(run, "reward/mean") for run in runs)],
        ["samples/s of all versions", *(mean(run, "perf/samples_per_s") for run in runs)],
        [
            "trainer waits, mean over time",
            *(mean(run, "trainer/idle_ratio", show=part) for run in runs),
        ],
        [
            "free decode slots, mean over time",
            *(mean(run, "rollouter/idle_ratio", show=part) for run in runs),
        ],
        [
            "age of tokens, mean",
            *(mean(run, "staleness/token_mean", "train/tokens") for run in runs),
        ],
        [
            "alarms",
            *(", ".join(sorted(alarm.name for alarm in run.alarms())) or "none" for run in runs),
        ],
    ]
    for metric in _validations(runs):
        rows.append([f"last {metric.removeprefix('val/')}", *(_last_of(run, metric) for run in runs)])  # fmt: skip
    return table("", ["", *names], rows)


def _last_of(run: RunReader, metric: str) -> str:
    values = by_version(run.validations, metric)[1]
    return number(values[-1]) if values and values[-1] is not None else ""


def _validations(runs: list[RunReader]) -> list[str]:
    """Return the metrics of validation that most runs have, without components."""
    found: dict[str, int] = {}
    for run in runs:
        for name in {name for row in run.validations.values() for name in row}:
            found[name] = found.get(name, 0) + (name.count("/") == 2)
    return sorted((n for n, c in found.items() if c), key=lambda n: (-found[n], n))[:_MOST_METRICS]


def _differences(runs: list[RunReader], names: list[str]) -> Block:
    configs = [run.keys() for run in runs]
    keys = sorted({key for config in configs for key in config})
    rows = [
        [key, *(config.get(key, "") for config in configs)]
        for key in keys
        if len({config.get(key) for config in configs}) > 1 and key != "trainer.run_dir"
    ]
    if not rows:
        return text("Every key of the configuration has the same value in all runs.")
    return table("Keys of the configuration that differ.", ["key", *names], rows[:200])


Points = Callable[[RunReader], tuple[list[float], list[float | None]]]


def _curves(runs: list[RunReader], names: list[str], points: Points) -> list[dict[str, Any]]:
    curves = []
    for run, name, colour in zip(runs, names, PALETTE, strict=False):
        x, y = points(run)
        if x:
            curves.append(line(name, x, y, colour))
    return curves


def _over_time(run: RunReader, metric: str) -> tuple[list[float], list[float | None]]:
    """Return a metric over the seconds of training until its version."""
    seconds = 0.0
    x: list[float] = []
    y: list[float | None] = []
    for version in sorted(run.rows):
        row = run.rows[version]
        seconds += row.get("timing_s/step", 0.0)
        if metric in row:
            x.append(seconds)
            y.append(row[metric])
    return x, y


def _learning(runs: list[RunReader], names: list[str]) -> list[Block]:
    def chart(how: str, title: str, points: Points, y: str = "reward") -> Block:
        data = _curves(runs, names, points)
        if not data:
            return missing(y, "no run has it yet.")
        return figure(
            how, data, xaxis={"title": {"text": title}}, yaxis={"title": {"text": label(y)}}
        )

    blocks = [
        chart(
            "Mean reward of the trained responses by version. Runs with the same data and reward "
            "can be compared, others cannot.",
            "version",
            lambda run: by_version(run.rows, "reward/mean"),
        ),
        chart(
            "The same over the trainer's seconds. The higher curve learns faster on these devices: "
            "take its `mode` and its numbers.",
            "seconds of RL",
            lambda run: _over_time(run, "reward/mean"),
        ),
    ]
    for metric in _validations(runs):
        short = metric.removeprefix("val/")
        blocks.append(
            chart(
                f"Validation {short} by version. It counts more than the reward, because no run "
                "was trained on these problems.",
                "version",
                lambda run, metric=metric: by_version(run.validations, metric),  # type: ignore[misc]
                short,
            )
        )
    return blocks


def _speed(runs: list[RunReader], names: list[str]) -> list[Block]:
    data = _curves(runs, names, lambda run: by_version(run.rows, "perf/samples_per_s"))
    if not data:
        return [missing("speed", "no version was trained yet.")]
    how = (
        "Trained samples per second by version. Compare the level after the first versions. If a "
        "curve has deep dips, look at the timeline of that run: `millrace report RUN`."
    )
    return [figure(how, data, xaxis={"title": {"text": "version"}}, yaxis={"title": {"text": "samples/s"}, "rangemode": "tozero"})]  # fmt: skip


def _devices(runs: list[RunReader], names: list[str]) -> Block:
    columns = [_shares(run) for run in runs]
    keys = sorted({key for column in columns for key in column})
    if not keys:
        return missing("accounts of time", "no run has accounts.jsonl.")
    rows = [[key, *(share(c[key], 1) if key in c else "" for c in columns)] for key in keys]
    how = (
        "Share of the time of each side's devices. A larger wait in one run shows what its mode "
        "costs."
    )
    return table(how, ["device and state", *names], rows)


def _shares(run: RunReader) -> dict[str, float]:
    """Return the share of the time of each side's devices by state."""
    sides: dict[str, dict[str, float]] = {}
    for name, track in totals.device_seconds(run.accounts).items():
        states = sides.setdefault(name.partition("-")[0], {})
        for part, value in track.all.items():
            words = STATES[state_of(part)].words
            states[words] = states.get(words, 0.0) + value
    return {
        f"{side} {words}": value / whole
        for side, states in sides.items()
        if (whole := sum(states.values()))
        for words, value in states.items()
        if value > 1e-6 * whole
    }


def _tokens(runs: list[RunReader], names: list[str]) -> Block:
    last = [run.accounts[-1] if run.accounts else None for run in runs]
    buckets = sorted({name for line in last if line for name in line.tokens})
    if not buckets:
        return missing("accounts of tokens", "no run has accounts.jsonl.")
    rows: list[list[object]] = [
        [bucket, *(share(line.tokens.get(bucket, 0), line.generated) if line else "" for line in last)]
        for bucket in buckets
    ]  # fmt: skip
    rows.append(["generated tokens", *(line.generated if line else "" for line in last)])
    return table("Share of all drawn tokens in each bucket.", ["bucket", *names], rows)


def _staleness(runs: list[RunReader], names: list[str]) -> Block:
    data = _curves(runs, names, lambda run: by_version(run.rows, "staleness/token_mean"))
    if not data:
        return missing("staleness", "no run has it yet.")
    how = (
        "Mean age of the trained tokens in versions. Less is more on-policy; "
        "`async_training.staleness_threshold` bounds it."
    )
    return figure(how, data, xaxis={"title": {"text": "version"}}, yaxis={"title": {"text": "versions"}, "rangemode": "tozero"})  # fmt: skip
