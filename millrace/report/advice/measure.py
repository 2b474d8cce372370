"""From the files of a run to the figures that advice reads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from millrace.config import Config, recipe
from millrace.config.algorithm_keys import without_own_algorithm
from millrace.config.layers import Tree, expand, settings_of
from millrace.errors import ConfigError
from millrace.observe.timing import TOTALS
from millrace.persist.accounts import Line
from millrace.persist.run_reader import RunReader
from millrace.report.accounts.pace import StepCost, step_costs
from millrace.report.advice.advise import Advice, advise
from millrace.report.advice.measured import Measured, Setup
from millrace.schedule.schedule import Schedule
from millrace.schedule.steady import counted

Rows = Mapping[int, Mapping[str, float]]
"""The rows of metrics.jsonl, by version."""


MOST_VERSIONS = 60
"""The newest versions show how a decode step grows."""


def setup_of(config: Config) -> Setup:
    """Return the numbers of a configuration that advice reads."""
    parts = config.reward.parts.values()
    trainer, rollout = config.trainer, config.rollout
    limited = [part for part in parts if part.kind == "function"]
    return Setup(
        schedule=config.schedule,
        mode=config.mode_name,
        n=rollout.n,
        trainers=trainer.ranks,
        rollouts=rollout.devices,
        replicas=rollout.replicas,
        slots=rollout.replicas * rollout.max_num_seqs,
        reward_workers=limited[0].num_workers if len(limited) == len(parts) == 1 else 0,
        test_freq=config.test_freq,
        test_key="trainer.test_freq" if trainer.test_freq else "rollout.test_freq",
        save_freq=trainer.save_freq,
        async_save=trainer.async_save,
        trainer_node=trainer.n_gpus_per_node if trainer.nnodes > 1 else 0,
        rollout_node=rollout.n_gpus_per_node if rollout.nnodes > 1 else 0,
    )


def measure(run: RunReader) -> Measured | None:
    """Return the figures of a run so far, or None if it has too few versions."""
    if run.config is None or not run.accounts:
        return None
    setup = setup_of(run.config)
    rows = {version: row for version, row in run.rows.items() if _whole(row)}
    return measured_of(setup, rows, run.attempt, steady_versions(setup.schedule, rows, run.attempt))


def advise_run(run: RunReader) -> list[Advice]:
    """Return advice on a run so far, or nothing if it has too few versions.

    If the configuration refuses the values of a sentence, it says why.
    """
    measured = measure(run)
    return [] if measured is None else checked(advise(measured), run.tree)


def checked(advice: Sequence[Advice], tree: Tree) -> list[Advice]:
    """Return the advice, with what the configuration `tree` says against its values, if anything."""
    found = []
    for one in advice:
        try:
            layers, *_ = expand([settings_of(one.overrides)])
            recipe.parse(recipe.resolve([without_own_algorithm(tree), *layers]))
        except ConfigError as error:
            one = replace(one, text=f"{one.text}. Change another key too: {error}")
        found.append(one)
    return found


def steady_versions(schedule: Schedule, rows: Rows, attempt: Sequence[Line]) -> range:
    """Return the versions of an attempt in which the pipeline neither fills nor drains.

    They count from 0, at the start of the attempt. An attempt that runs does not drain yet.
    """
    start = attempt[0].version
    samples = sum(int(row["train/samples"]) for v, row in rows.items() if v > start)
    drained = attempt[-1].samples and not sum(attempt[-1].samples.values())
    ahead = 0 if drained else schedule.capacity
    steps = counted(samples + ahead, 1, schedule)
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
    setup = replace(setup, share_cores=lines[ends[1]].share_cores)
    return _totals(setup, used, lines[ends[0]], lines[ends[1]], _step_costs(rows, attempt))


def _totals(
    setup: Setup,
    rows: Sequence[Mapping[str, float]],
    before: Line,
    after: Line,
    costs: tuple[StepCost, StepCost] | None,
) -> Measured:
    """Return the figures of these rows. The lines are the accounts at both ends."""

    def total(name: str) -> float:
        return sum(row.get(name) or 0.0 for row in rows)

    def over_time(name: str) -> float:
        return sum((row.get(name) or 0.0) * row["perf/time_per_version"] for row in rows)

    seconds = total("perf/time_per_version")
    # A row ends a moment after its line.
    scale = seconds / max(1e-9, after.seconds - before.seconds)
    timing = {name: total(f"timing_s/{name}") for name in _timings(rows)}
    usable = min(setup.slots, setup.schedule.capacity * setup.n)
    tokens = {
        name: max(0, count - before.tokens.get(name, 0)) for name, count in after.tokens.items()
    }
    trained = sum(tokens.get(name, 0) for name in ("trained", "rejected", "filtered"))
    dropped = _of_prefix(tokens, "dropped/")
    states = {state: after.slots[state] - before.slots.get(state, 0.0) for state in after.slots}

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
        reused_tokens=over_time("rollouter/reused_tokens_per_s"),
        agents=any("agents/turns/mean" in row for row in rows),
        prompt_tokens=setup.n
        * sum((row.get("prompt_length/mean") or 0.0) * row["train/samples"] for row in rows)
        * (1 + sum(dropped.values()) / max(1, trained)),
        trained_tokens=trained,
        dropped_tokens=dropped,
        request_s=(after.requests.seconds - before.requests.seconds) * scale,
        tool_s=over_time("agents/waiting"),
        score_s=(after.scores.seconds - before.scores.seconds) * scale,
        reward_wait_s=_seconds_of(after, "wait_rewards") - _seconds_of(before, "wait_rewards"),
        scores=after.scores.count - before.scores.count,
        any_score_s=(after.scores.busy - before.scores.busy) * scale,
        hold_s=total("sync/hold_s"),
        mean_length=total("response_length/mean") / len(rows),
        longest_of_n=sum(_longest(row, setup.n) for row in rows) / len(rows),
        longest=total("response_length/max") / len(rows),
        more_ready=_more(before, after, "ready"),
        more_running=_more(before, after, "waiting", "running"),
        step_cost=costs[0] if costs else None,
        flat_cost=costs[1] if costs else None,
    )


def _more(before: Line, after: Line, *states: str) -> int:
    """Return how many more samples are in these states than before."""
    return sum(after.samples.get(s, 0) - before.samples.get(s, 0) for s in states)


def _timings(rows: Sequence[Mapping[str, float]]) -> set[str]:
    """Return the names of the trainer's times in these rows."""
    names = {name for row in rows for name in row}
    return {name.removeprefix("timing_s/") for name in names if name.startswith("timing_s/")}


def _seconds_of(line: Line, state: str) -> float:
    """Return the mean seconds of this state over the tracks that draw."""
    found = [d.seconds.get(state, 0.0) for track, d in line.devices.items() if track != "trainer"]
    return sum(found) / len(found) if found else 0.0


def _of_prefix(tokens: Mapping[str, int], prefix: str) -> dict[str, float]:
    """Return the counts whose names begin with `prefix`, by the rest of the name."""
    return {k.removeprefix(prefix): float(v) for k, v in tokens.items() if k.startswith(prefix)}


def _longest(row: Mapping[str, float], n: int) -> float:
    """Return the mean length of the longest of n responses, from the percentiles of a row.

    For a tail that falls exponentially, it is the quantile 1 - 0.56 / n.
    """
    names = ("mean", "p50", "p90", "p99", "max")
    mean, *lengths = (row.get(f"response_length/{name}") or 0.0 for name in names)
    wanted, shares = 1 - 0.56 / n, (0.5, 0.9, 0.99, 1.0)
    if n == 1:
        return mean
    for k in range(3):
        if wanted <= shares[k + 1]:
            part = max(0.0, (wanted - shares[k]) / (shares[k + 1] - shares[k]))
            return lengths[k] + part * (lengths[k + 1] - lengths[k])
    return lengths[3]


def _step_costs(rows: Rows, attempt: Sequence[Line]) -> tuple[StepCost, StepCost] | None:
    """Return what a decode step costs. All versions of the attempt count: their loads differ."""
    versions = []
    for before, after in itertools.pairwise(attempt):
        row = rows.get(after.version)
        if row is None or after.version != before.version + 1:
            continue
        loads = {
            name: [new - old for new, old in zip(bin_, before.loads.get(name, (0, 0)), strict=True)]
            for name, bin_ in after.loads.items()
        }
        tokens = (row.get("rollouter/tokens_per_s") or 0.0) * row["perf/time_per_version"]
        versions.append((loads, tokens))
    return step_costs(versions[-MOST_VERSIONS:])


def _whole(row: Mapping[str, float]) -> bool:
    """Whether a row has the figures that advice needs. It divides by the first two."""
    positive = ("perf/time_per_version", "train/samples")
    return "rollouter/idle_ratio" in row and all(0 < row.get(name, 0) < 1e15 for name in positive)
