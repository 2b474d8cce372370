"""`millrace bench modes`: modes and splits of the same devices, on the same samples, in one run."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millrace.bench.flops import train_flops
from millrace.config import Config, recipe
from millrace.errors import bad_value
from millrace.observe.progress import Progress
from millrace.rollout.episode import request_seed
from millrace.run.folder import RunDir, open_run_dir
from millrace.run.session import Session, open_session
from millrace.run.stop import StopRequest
from millrace.run.train import drawn_lengths, run_training
from millrace.schedule.ledger import Ledger
from millrace.schedule.modes import MODES
from millrace.schedule.schedule import Schedule
from millrace.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Arm:
    """One mode on one split of the devices."""

    mode: str
    trainers: int
    rollouts: int
    uniform: bool = False
    """Whether all responses have the mean of the drawn lengths."""

    @property
    def colocated(self) -> bool:
        return MODES[self.mode].colocated

    @property
    def overrides(self) -> list[str]:
        return [
            f"mode={self.mode}",
            f"trainer.n_gpus_per_node={self.trainers}",
            f"rollout.n_gpus_per_node={self.rollouts}",
        ]

    def __str__(self) -> str:
        name = (
            f"{self.mode} on {self.trainers}"
            if self.colocated
            else f"{self.mode} {self.trainers}+{self.rollouts}"
        )
        return f"{name}, uniform" if self.uniform else name


QUIET = [
    "sft.steps=0",
    "trainer.val_before_train=false",
    "rollout.test_freq=0",
    "trainer.test_freq=0",
    "trainer.save_freq=0",
    "trainer.save_last=false",
]
QUIET += ["data.val_files=[]", "trainer.logger=[]", "guard.enable=false"]


def arms_of(modes: Sequence[str], splits: Sequence[str], uniform: Sequence[str] = ()) -> list[Arm]:
    """Every mode on every split: TRAINERS+ROLLOUTS devices, or all of them for colocated ones; those of `uniform` again with equal
    lengths. Raises ConfigError.
    """
    arms: list[Arm] = []
    for mode in [*modes, *uniform]:
        if mode not in MODES:
            raise bad_value("--modes", mode, "no mode", f"one of {', '.join(MODES)}")
        for split in splits:
            sides = split.split("+")
            if len(sides) != 2 or not all(side.isdigit() and int(side) for side in sides):
                raise bad_value(
                    "--splits",
                    split,
                    "devices that train, a plus, devices that roll out",
                    "--splits 1+1",
                )
            t, r = map(int, sides)
            arm = Arm(mode, t + r, t + r) if MODES[mode].colocated else Arm(mode, t, r)
            arms += [] if arm in arms else [arm]
    return [
        *(a for a in arms if a.mode in modes),
        *(replace(a, uniform=True) for a in arms if a.mode in uniform),
    ]


async def bench_modes(
    path: Path,
    overrides: Sequence[str],
    arms: Sequence[Arm],
    folder: Path,
    progress: Progress,
    figures: list[dict[str, Any]],
    *,
    skip: int,
    repeats: int,
) -> None:
    """The figures of every run, appended to `figures`. Arms that share engines run on the same ones, in turn, `repeats` times.

    Versions that are not `counted`, in which the pipeline fills or drains and kernels compile, are in no figure but `seconds`. Each
    run's figures are a line of FOLDER/figures.jsonl as soon as they are there.
    """
    engines = {
        (arm.colocated, arm.trainers, arm.rollouts): [
            a for a in arms if _engines(a) == _engines(arm)
        ]
        for arm in arms
    }
    for arm in arms:
        c = recipe.load(path, overrides, [*QUIET, *arm.overrides])
        check_size(c.schedule, c.rollout.total_rollout_steps, arm.mode, skip)
    for k, group in enumerate(engines.values()):
        config = recipe.load(
            path,
            overrides,
            [*QUIET, *group[0].overrides, f"trainer.run_dir={folder / f'engines-{k}'}"],
        )
        async with open_session(config, progress) as s:
            rate = (await s.engines.train.matmul_rates())[0]
            alone: dict[tuple[bool, int], float] = {}
            for turn in range(repeats):
                for arm in group:
                    # A layer over the user's: what a mode fixes is not theirs to change for all of them.
                    said = [*QUIET, *arm.overrides, f"trainer.run_dir={folder / f'{arm}-{turn}'}"]
                    own = recipe.load(
                        path, overrides, [*said, *(_uniform(s) if arm.uniform else ())]
                    )
                    session = replace(s, config=own, run=folder_of_run(own, s))
                    found = await _run(session, skip)
                    requests = (arm.uniform, own.schedule.capacity)
                    if requests not in alone:
                        alone[requests] = await _alone(session)
                    figures.append(_with_ceilings(found, arm, turn, session, rate, alone[requests]))
                    with (folder / "figures.jsonl").open(
                        "a"
                    ) as lines:  # at once: a later arm may fail
                        lines.write(json.dumps(figures[-1]) + "\n")
                    progress.note(f"{arm}: {found['samples_per_s']:.2f} samples/s")


def _engines(arm: Arm) -> tuple[bool, int, int]:
    return arm.colocated, arm.trainers, arm.rollouts


def _uniform(s: Session) -> list[str]:
    """Return overrides that make every response as long as the mean."""
    config = s.config
    if drawn_lengths(config) is None:
        raise bad_value(
            "--uniform",
            "",
            "the recipe draws no lengths",
            "rollout.drawn_lengths.enable=true, or leave it out",
        )
    prompts = (
        sum(len(s.problems.train[i].tokens) for i in range(config.rollout.total_rollout_steps))
        * config.rollout.n
    )
    lengths = _lengths(s)
    return [
        "rollout.drawn_lengths.sigma=0",
        f"rollout.drawn_lengths.median={(sum(lengths) - prompts) / len(lengths):.1f}",
    ]


def folder_of_run(config: Config, s: Session) -> RunDir:
    """A folder for one of the runs on a session's engines, with their model."""
    run = open_run_dir(config)
    run.model.symlink_to(s.run.model.resolve())
    return run


async def _run(s: Session, skip: int) -> dict[str, float]:
    """One run from the weights that the engines have, reduced to its figures."""
    await s.engines.train.begin("rl", s.config.derived(len(s.problems.train)).lr_horizon)
    ledger = Ledger(s.config.schedule, s.config.rollout.total_rollout_steps)
    outcome = await run_training(s, ledger, StopRequest())
    await s.engines.turns.enter()
    lines = map(json.loads, (s.run.path / "metrics.jsonl").read_text().splitlines())
    rows = [row for row in lines if "reward/mean" in row]
    rows = [
        rows[k]
        for k in counted(int(sum(row["train/samples"] for row in rows)), skip, s.config.schedule)
    ]
    wall = sum(row["perf/time_per_version"] for row in rows)

    def over_time(name: str) -> float:
        return sum(row[name] * row["perf/time_per_version"] for row in rows) / wall

    def seconds(part: str) -> float:
        return sum(row.get(f"timing_s/{part}", 0.0) for row in rows) / len(rows)

    samples = sum(row["train/samples"] for row in rows)
    drawn = over_time("rollouter/tokens_per_s")
    return {
        "seconds": outcome.train_seconds,
        "samples_per_s": samples / wall,
        "trained_tokens_per_s": sum(row["train/tokens"] for row in rows) / wall,
        "drawn_tokens_per_s": drawn,
        # Tokens read into KV caches: prompts, and again what was interrupted.
        "read_per_drawn": over_time("rollouter/prefill_tokens_per_s") / drawn if drawn else 0.0,
        "version_s": wall / len(rows),
        "step_s": seconds("step"),
        "wait_samples_s": seconds("wait_samples"),
        "wait_rollouts_s": seconds("wait_rollouts"),
        "switch_s": seconds("switch"),
        "wait_publish_s": seconds("wait_publish"),
        "sync_transfer_s": statistics.mean(row["sync/transfer_s"] for row in rows),
        "sync_pause_s": statistics.mean(row["sync/pause_s"] for row in rows),
        "trainer_idle": over_time("trainer/idle_ratio"),
        "rollouter_idle": over_time("rollouter/idle_ratio"),
        "staleness": sum(row["staleness/mean"] * row["train/samples"] for row in rows) / samples,
        "staleness_max": max(row["staleness/max"] for row in rows),
    }


def counted(samples: int, skip: int, schedule: Schedule) -> range:
    """Which versions of a run of so many samples are like those of a long run. Not those of the first `skip` optimizer steps; not the
    first ones, for which samples were drawn ahead while the trainer had nothing to do; nor the last, beside which no window of samples
    was admitted any more.
    """
    ahead = math.ceil(schedule.capacity / schedule.window) - 1
    steps = schedule.trigger_parameter_sync_step * schedule.require_batches
    end = (samples - schedule.capacity) // schedule.window + 1
    return range(max(math.ceil(skip / steps), ahead + 1 if ahead else 0), end)


def check_size(schedule: Schedule, total: int, mode: str, skip: int) -> None:
    """Raise ConfigError if no version of a run of `total` samples would be counted."""
    if not counted(total, skip, schedule):
        versions, window = schedule.versions(total), schedule.window
        least = next(n for n in itertools.count(window, window) if counted(n, skip, schedule))
        rule = f"{versions} versions in mode {mode}: all are skipped, or fill or drain the pipeline"
        raise bad_value("rollout.total_rollout_steps", total, rule, f"{least} or more")


def _with_ceilings(
    found: dict[str, float],
    arm: Arm,
    turn: int,
    s: Session,
    rate: float,
    alone: float,
) -> dict[str, Any]:
    """The figures, against what the devices can do."""
    flops = train_flops(s.run.model, _lengths(s), s.config)
    per_sample = flops / s.config.rollout.total_rollout_steps
    stepping = found["step_s"] / found["version_s"]
    mfu = found["samples_per_s"] * per_sample / (arm.trainers * rate) / stepping
    decoding = found["drawn_tokens_per_s"] / alone
    names = {
        "arm": str(arm),
        "mode": arm.mode,
        "trainers": arm.trainers,
        "rollouts": arm.rollouts,
        "turn": turn,
    }
    return (
        names
        | found
        | {
            "matmul_tflops": rate / 1e12,
            "mfu_in_steps": mfu,
            "alone_tokens_per_s": alone,
            "share_of_alone": decoding,
        }
    )


def _lengths(s: Session) -> list[int]:
    """Prompt and response tokens of every trajectory of the run, where responses have drawn lengths; the limit elsewhere."""
    config = s.config
    drawn, n = drawn_lengths(config), config.rollout.n
    limit = config.rollout.max_response_length
    found = []
    for i in range(config.rollout.total_rollout_steps):
        prompt = len(s.problems.train[i].tokens)
        found += [
            prompt + (drawn.of(request_seed(config.trainer.seed, i, k)) if drawn else limit)
            for k in range(n)
        ]
    return found


async def _alone(s: Session) -> float:
    """Tokens a second of the same engines with nothing but requests: all that the mode may have under way, at once, of the lengths that
    they have.
    """
    config = s.config
    drawn, rollout = drawn_lengths(config), config.rollout

    def one(i: int, k: int) -> Any:
        seed = request_seed(config.trainer.seed, i, k)
        length = drawn.of(seed) if drawn else rollout.max_response_length
        params = SamplingParams(
            length,
            rollout.temperature,
            seed=seed,
            ignore_eos=rollout.ignore_eos or drawn is not None,
        )
        return s.engines.pool.generate(s.problems.train[i].tokens, params, f"{i}/{k}")

    await s.engines.publish(0)
    clock, before = asyncio.get_running_loop().time, (await s.engines.pool.stats()).tokens
    start = clock()
    await asyncio.gather(
        *(one(i, k) for i in range(config.schedule.capacity) for k in range(rollout.n))
    )
    seconds = clock() - start
    drawn_tokens = (await s.engines.pool.stats()).tokens - before
    await s.engines.turns.enter()
    return drawn_tokens / seconds


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Markdown: medians over repeats, fastest first; ratios against the fastest split of colocate_sync on the same lengths, else the
    slowest arm.
    """
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for run in figures:
        by_arm.setdefault(run["arm"], []).append(run)
    middle = {
        arm: {
            k: statistics.median(r[k] for r in runs)
            for k, v in runs[0].items()
            if isinstance(v, float)
        }
        for arm, runs in by_arm.items()
    }
    rates = {arm: m["samples_per_s"] for arm, m in middle.items()}

    def baseline(uniform: bool) -> float:
        alike = {arm: rate for arm, rate in rates.items() if arm.endswith(", uniform") == uniform}
        base = [rate for arm, rate in alike.items() if by_arm[arm][0]["mode"] == "colocate_sync"]
        return max(base) if base else min(alike.values())

    head = "| arm | samples/s | ratio | idle trainer | idle rollouter | version s | step s | transfer s | pause s | staleness | MFU in steps | of rollouts alone | read per drawn |"
    rows = [head, "|---" + "|--:" * 12 + "|"]
    for arm in sorted(middle, key=lambda a: -rates[a]):
        m = middle[arm]
        rows.append(
            f"| {arm} | {m['samples_per_s']:.2f} | {m['samples_per_s'] / baseline(arm.endswith(', uniform')):.2f} | {m['trainer_idle']:.0%} | {m['rollouter_idle']:.0%} "
            f"| {m['version_s']:.2f} | {m['step_s']:.2f} | {m['sync_transfer_s']:.3f} | {m['sync_pause_s']:.3f} | {m['staleness']:.2f} "
            f"| {m['mfu_in_steps']:.0%} | {m['share_of_alone']:.0%} | {m['read_per_drawn']:.2f} |"
        )
    return "\n".join(rows)
