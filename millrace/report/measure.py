"""From the files of a run to the figures that advice reads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from millrace.config import Config, recipe
from millrace.errors import ConfigError
from millrace.observe.sinks import read_rows
from millrace.observe.timing import TOTALS
from millrace.report.accounts import Line, read
from millrace.report.measured import Measured, Setup
from millrace.schedule.modes import name_of
from millrace.schedule.steady import counted

Rows = Mapping[int, Mapping[str, float]]
"""The rows of metrics.jsonl, by version."""

LEAST_POINTS = 5
"""Versions with different loads that show how a decode step grows."""
LEAST_SPREAD = 1.15
"""The largest of these loads, as a multiple of the smallest."""
MOST_POINTS = 60
"""The newest versions that count."""
LOW_EDGE = 0.2
"""The quantile of the points that the line follows."""


def setup_of(config: Config) -> Setup:
    """Return the numbers that advice reads."""
    parts = config.reward.parts.values()
    limited = [part for part in parts if part.kind == "function"]
    return Setup(
        schedule=config.schedule,
        mode=name_of(config.schedule, config.mode),
        n=config.rollout.n,
        trainers=config.trainer_ranks,
        rollouts=config.rollout_devices,
        replicas=config.replicas,
        slots=config.replicas * config.rollout.max_num_seqs,
        reward_workers=limited[0].num_workers if len(limited) == len(parts) == 1 else 0,
        test_freq=config.test_freq,
        save_freq=config.trainer.save_freq,
        async_save=config.trainer.async_save,
    )


def config_of(run_dir: Path) -> Config | None:
    """Return the configuration of a run, or None if its file is missing or foreign."""
    try:
        tree = yaml.safe_load((run_dir / "config.yaml").read_text())
        return recipe.parse(tree) if isinstance(tree, dict) else None
    except (OSError, ValueError, yaml.YAMLError, ConfigError):
        return None


def measure(run_dir: Path) -> Measured | None:
    """Return the figures of a run so far, or None if it has too few versions."""
    config = config_of(run_dir)
    lines = read(run_dir)
    if config is None or not lines:
        return None
    rows = {v: row for v, row in read_rows(run_dir, 10**12)[0].items() if _whole(row)}
    attempt = [line for line in lines if line.attempt == lines[-1].attempt]
    return measured_of(setup_of(config), rows, attempt, steady_versions(config, rows, attempt))


def steady_versions(config: Config, rows: Rows, attempt: Sequence[Line]) -> range:
    """Return the versions of an attempt in which the pipeline neither fills nor drains.

    They count from 0, at the start of the attempt. An attempt that runs does not drain yet.
    """
    start = attempt[0].version
    samples = sum(int(row["train/samples"]) for v, row in rows.items() if v > start)
    drained = attempt[-1].samples and not sum(attempt[-1].samples.values())
    ahead = 0 if drained else config.schedule.capacity
    steps = counted(samples + ahead, 1, config.schedule)
    have = sum(v > start for v in rows)
    return range(steps.start, min(steps.stop, have))


def measured_of(
    setup: Setup, rows: Rows, attempt: Sequence[Line], versions: range
) -> Measured | None:
    """Return the figures of these versions, which count from 0 at the start of the attempt.

    Return None if a row or a line of accounts of one of them is missing.
    """
    start = attempt[0].version if attempt else 0
    lines = {line.version: line for line in attempt}
    chosen = [rows.get(start + k + 1) for k in versions]
    used = [row for row in chosen if row is not None]
    ends = start + versions.start, start + versions.stop
    if not used or len(used) < len(chosen) or not all(end in lines for end in ends):
        return None
    usable = min(setup.slots, setup.schedule.capacity * setup.n)
    growth = step_growth([row for v, row in rows.items() if v > start], used, usable)
    return _totals(setup, used, lines[ends[0]], lines[ends[1]], growth)


def _totals(
    setup: Setup,
    rows: Sequence[Mapping[str, float]],
    before: Line,
    after: Line,
    growth: float | None,
) -> Measured:
    """Return the figures of these rows. The lines are the accounts at both ends."""

    def total(name: str) -> float:
        return sum(row.get(name) or 0.0 for row in rows)

    def over_time(name: str) -> float:
        return sum((row.get(name) or 0.0) * row["perf/time_per_version"] for row in rows)

    seconds = total("perf/time_per_version")
    # A row ends a moment after its line.
    scale = seconds / max(1e-9, after.seconds - before.seconds)
    names = {name for row in rows for name in row if name.startswith("timing_s/")}
    timing = {name.removeprefix("timing_s/"): total(name) for name in names}
    usable = min(setup.slots, setup.schedule.capacity * setup.n)
    tokens = {
        name: max(0, count - before.tokens.get(name, 0)) for name, count in after.tokens.items()
    }
    states = {state: after.slots[state] - before.slots.get(state, 0.0) for state in after.slots}
    finished = after.samples.get("ready", 0) - before.samples.get("ready", 0)
    return Measured(
        setup=setup,
        versions=len(rows),
        seconds=seconds,
        trainer={name: value for name, value in timing.items() if name not in TOTALS},
        held={state: value * scale for state, value in states.items()},
        samples=int(total("train/samples")),
        busy_slot_s=usable * (seconds - over_time("rollouter/idle_ratio")),
        drawn_tokens=over_time("rollouter/tokens_per_s"),
        read_tokens=over_time("rollouter/prefill_tokens_per_s"),
        trained_tokens=sum(tokens.get(name, 0) for name in ("trained", "rejected", "filtered")),
        dropped_tokens={
            name.removeprefix("dropped/"): float(count)
            for name, count in tokens.items()
            if name.startswith("dropped/")
        },
        request_s=(after.requests.seconds - before.requests.seconds) * scale,
        score_s=(after.scores.seconds - before.scores.seconds) * scale,
        scores=after.scores.count - before.scores.count,
        hold_s=total("sync/hold_s"),
        longest=total("response_length/max") / len(rows),
        stock_change=finished,
        step_growth=growth,
    )


def step_growth(
    rows: Sequence[Mapping[str, float]], counted_rows: Sequence[Mapping[str, float]], usable: int
) -> float | None:
    """Return the share of a decode step that grows with the requests in it.

    Versions have different loads, above all while a run begins. A version whose load changes has
    longer steps than one with the same mean load that stays: the seconds of a step are a mean over
    tokens, and most tokens are drawn at a high load. So the line through the seconds of a step over
    the load runs along the lower edge of the points. It has the least pinball loss of the quantile
    LOW_EDGE. The result is its slope at the load of the counted versions. None if the loads are too
    much alike.
    """
    points = [point for row in rows[-MOST_POINTS:] if (point := _load_and_step(row, usable))]
    if len(points) < LEAST_POINTS:
        return None
    if max(points)[0] < LEAST_SPREAD * min(points)[0]:
        return None
    lines = [_line(p, q) for p, q in itertools.combinations(points, 2) if q[0] != p[0]]
    start, slope = min(lines, key=lambda line: _pinball(line, points))
    wall = sum(row["perf/time_per_version"] for row in counted_rows)
    idle = sum(
        (row.get("rollouter/idle_ratio") or 0.0) * row["perf/time_per_version"]
        for row in counted_rows
    )
    load = usable * (1 - idle / wall)
    step = start + slope * load
    return min(1.0, max(0.0, slope * load / step)) if step > 0 else None


def _load_and_step(row: Mapping[str, float], usable: int) -> tuple[float, float] | None:
    """Return the mean busy slots of a version and the seconds of its decode steps."""
    load = usable * (1 - (row.get("rollouter/idle_ratio") or 0.0))
    speed = row.get("rollouter/tokens_per_s") or 0.0
    return (load, load / speed) if load > 0 and speed > 0 else None


def _line(p: tuple[float, float], q: tuple[float, float]) -> tuple[float, float]:
    """Return the start and the slope of the line through two points."""
    slope = (q[1] - p[1]) / (q[0] - p[0])
    return p[1] - slope * p[0], slope


def _pinball(line: tuple[float, float], points: Sequence[tuple[float, float]]) -> float:
    """Return the pinball loss of the quantile LOW_EDGE."""
    above = [step - line[0] - line[1] * load for load, step in points]
    return sum(LOW_EDGE * d if d > 0 else (LOW_EDGE - 1) * d for d in above)


def _whole(row: Mapping[str, float]) -> bool:
    """Whether a row has the figures that advice needs, as numbers."""
    needed = ("perf/time_per_version", "train/samples", "rollouter/idle_ratio")
    return all(isinstance(row.get(name), (int, float)) for name in needed)
