"""`millrace bench modes`: a comparison of modes and of splits of the devices, on equal samples, and its table."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millrace.config import recipe
from millrace.errors import bad_value
from millrace.extras.bench.engines import shape_of, train_flops
from millrace.observe.progress import Progress
from millrace.persist.run_reader import RunReader
from millrace.report.advice import advise
from millrace.rollout.episode import request_seed
from millrace.run import problems
from millrace.run.folder import open_run_dir
from millrace.run.session import Session, open_session
from millrace.run.signals import StopRequest
from millrace.run.train import drawn_lengths, run_training
from millrace.schedule.ledger import Ledger
from millrace.schedule.modes import MODES
from millrace.schedule.schedule import Schedule
from millrace.schedule.steady import counted
from millrace.types import SamplingParams

MOST_STOCK = 0.05
"""A stock of finished samples that changes more makes a rate of training no rate of the run."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One mode on one split of the devices."""

    mode: str
    trainers: int
    rollouts: int
    uniform: bool = False
    """Whether all responses have the mean of the drawn lengths."""
    staleness: float | None = None
    """staleness_threshold, if it is not the recipe's. A mode may fix it."""
    note: str = ""
    """What else this arm differs in."""

    @property
    def colocated(self) -> bool:
        return MODES[self.mode].colocated

    @property
    def overrides(self) -> list[str]:
        return [
            f"mode={self.mode}",
            f"trainer.n_gpus_per_node={self.trainers}",
            f"rollout.n_gpus_per_node={self.rollouts}",
            *(
                [f"async_training.staleness_threshold={self.staleness:g}"]
                if self.staleness is not None
                else ()
            ),
        ]

    def __str__(self) -> str:
        name = (
            f"{self.mode} on {self.trainers}"
            if self.colocated
            else f"{self.mode} {self.trainers}+{self.rollouts}"
        )
        if self.staleness is not None:
            name += f", staleness {self.staleness:g}"
        if self.note:
            name += f", {self.note}"
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
QUIET += ["report.trace=false", "report.samples=0"]
QUIET += ["trainer.mirror=''"]
QUIET += ["trainer.max_restarts=0", "rollout.max_restarts=0"]  # No figure has a recovery in it.


def arms_of(modes: Sequence[str], splits: Sequence[str], uniform: Sequence[str] = ()) -> list[Arm]:
    """Return an arm for every mode on every split TRAINERS+ROLLOUTS.

    The modes of `uniform` have further arms, with responses of equal lengths. A colocated mode uses
    all devices of a split for both sides. Raises ConfigError for an unknown mode or a wrong split.
    """
    arms: list[Arm] = []
    for mode in [*modes, *uniform]:
        if mode not in MODES:
            raise bad_value("--modes", mode, "no such mode", f"one of {', '.join(MODES)}")
        for split in splits:
            sides, shared = split.split("+"), MODES[mode].colocated
            needed = sides[:1] if shared else sides  # "1+0" is one device for a colocated mode
            if len(sides) != 2 or not (
                all(side.isdigit() for side in sides) and all(int(side) for side in needed)
            ):
                raise bad_value(
                    "--splits",
                    split,
                    "must be TRAINERS+ROLLOUTS, two numbers of devices over 0",
                    "--splits 1+1",
                )
            t, r = map(int, sides)
            arm = Arm(mode, t + r, t + r) if shared else Arm(mode, t, r)
            arms += [] if arm in arms else [arm]
    return [
        *(a for a in arms if a.mode in modes),
        *(replace(a, uniform=True) for a in arms if a.mode in uniform),
    ]


Figures = dict[str, Any]
Measure = Callable[[Arm, int, Session], Awaitable[Figures]]
"""Runs an arm once, in its turn, on a session that has its configuration and its folder."""


async def bench_modes(
    path: Path,
    overrides: Sequence[str],
    arms: Sequence[Arm],
    folder: Path,
    progress: Progress,
    figures: list[Figures],
    *,
    skip: int,
    repeats: int,
) -> None:
    """Run every arm `repeats` times and append the figures of each run to `figures`.

    Figures cover only the versions in `counted`, because in other versions the pipeline fills or
    drains, and kernels compile. `seconds` is the time of the whole run.
    """

    async def begin(s: Session) -> Measure:
        rate = (await s.engines.train.matmul_rates())[0]
        alone: dict[tuple[bool, int], float] = {}

        async def measure(arm: Arm, turn: int, session: Session) -> Figures:
            measured = await run_once(session, skip)
            requests = (arm.uniform, session.config.schedule.capacity)
            if requests not in alone:
                alone[requests] = await _alone(session)
            return _with_ceilings(measured, arm, turn, session, rate, alone[requests])

        return measure

    await run_arms(
        path, overrides, arms, folder, progress, figures, begin, skip=skip, repeats=repeats
    )


async def run_arms(
    path: Path,
    overrides: Sequence[str],
    arms: Sequence[Arm],
    folder: Path,
    progress: Progress,
    figures: list[Figures],
    begin: Callable[[Session], Awaitable[Measure]],
    *,
    skip: int,
    repeats: int,
) -> None:
    """Measure every arm `repeats` times and append the figures to `figures`.

    Arms with the same placement and split share engines, and run on them in turn. `begin` gets the
    session of these engines. After each run, its figures are added to FOLDER/figures.jsonl.
    """
    engines = {
        (arm.colocated, arm.trainers, arm.rollouts): [
            a for a in arms if _engines(a) == _engines(arm)
        ]
        for arm in arms
    }
    fixed_keys = dict(text.split("=", 1) for arm in arms for text in [*QUIET, *arm.overrides])
    for key, value in (text.split("=", 1) for text in overrides):
        if key.strip() in fixed_keys:
            progress.note(f"{key}={value} has no effect: the benchmark sets this key itself")
    rows = 0
    for arm in arms:
        c = recipe.load(path, overrides, [*QUIET, *arm.overrides])
        rows = rows or await asyncio.to_thread(problems.prompts_of_an_epoch, c)
        end = c.end(rows)
        check_size(c.schedule, end, c.value_of(end[0]), arm.mode, skip)
    for k, group in enumerate(engines.values()):
        config = recipe.load(
            path,
            overrides,
            [*QUIET, *group[0].overrides, f"trainer.run_dir={folder / f'engines-{k}'}"],
        )
        async with open_session(config, progress) as s:
            shape_of(s.run.model)
            measure = await begin(s)
            for turn in range(repeats):
                for arm in group:
                    # This layer is above the user's, so a user's key cannot change an arm.
                    fixed = [*QUIET, *arm.overrides, f"trainer.run_dir={folder / f'{arm}-{turn}'}"]
                    own = recipe.load(
                        path, overrides, [*fixed, *(_uniform(s) if arm.uniform else ())]
                    )
                    run = open_run_dir(own)
                    run.model.symlink_to(s.run.model.resolve())
                    session = replace(s, config=own, run=run)
                    figures.append(await measure(arm, turn, session))
                    # Write now, because a later arm may fail.
                    with (folder / "figures.jsonl").open("a") as lines:
                        lines.write(json.dumps(figures[-1]) + "\n")
                    progress.note(f"{arm}: {figures[-1]['samples_per_s']:.2f} samples/s")
                    for line in figures[-1].get("advice", [])[:1]:
                        progress.note(f"{arm}: {line}")


def _engines(arm: Arm) -> tuple[bool, int, int]:
    return arm.colocated, arm.trainers, arm.rollouts


def _uniform(s: Session) -> list[str]:
    """Return overrides that give every response the mean of the drawn lengths."""
    if drawn_lengths(s.config.rollout) is None:
        raise bad_value(
            "--uniform",
            "",
            "the recipe draws no lengths",
            "rollout.drawn_lengths.enable=true, or no --uniform",
        )
    prompts = sum(len(s.problems.train[i].tokens) for i in range(_samples(s))) * s.config.rollout.n
    lengths = _lengths(s)
    return [
        "rollout.drawn_lengths.sigma=0",
        f"rollout.drawn_lengths.median={(sum(lengths) - prompts) / len(lengths):.1f}",
    ]


def _samples(s: Session) -> int:
    """Return the number of samples of the run."""
    return s.derived.samples


async def run_once(s: Session, skip: int) -> dict[str, Any]:
    """Run once from the current weights of the engines, and return the figures."""
    await s.engines.train.begin("rl", s.derived.lr_horizon)
    ledger = Ledger(s.config.schedule, _samples(s))
    outcome = await run_training(s, ledger, StopRequest())
    await s.engines.turns.enter()
    run = RunReader(s.run.path).read()
    rows = list(run.rows.values())
    versions = counted(int(sum(row["train/samples"] for row in rows)), skip, s.config.schedule)
    flow = figures_of_flow(run, versions)
    rows = [rows[k] for k in versions]
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
        "counted_versions": len(rows),
        "trained_tokens_per_s": sum(row["train/tokens"] for row in rows) / wall,
        "drawn_tokens_per_s": drawn,
        # Tokens read into KV caches: prompts, and the prefixes of interrupted responses.
        "read_per_drawn": over_time("rollouter/prefill_tokens_per_s") / drawn if drawn else 0.0,
        "version_s": wall / len(rows),
        "step_s": seconds("train"),
        "wait_samples_s": seconds("wait_samples"),
        "wait_prev_gen_s": seconds("wait_prev_gen"),
        "wait_rollouts_s": seconds("wait_rollouts"),
        "switch_s": seconds("switch"),
        "wait_publish_s": seconds("wait_publish"),
        "sync_transfer_s": statistics.mean(row["sync/transfer_s"] for row in rows),
        "sync_pause_s": statistics.mean(row["sync/pause_s"] for row in rows),
        "trainer_idle": over_time("trainer/idle_ratio"),
        "rollouter_idle": over_time("rollouter/idle_ratio"),
        "staleness": sum(row["staleness/mean"] * row["train/samples"] for row in rows) / samples,
        "staleness_max": max(row["staleness/max"] for row in rows),
        # With an agent: sessions at an engine, at the closed gate, and with a tool.
        **{
            name.removeprefix("agents/"): over_time(name)
            for name in ("agents/drawing", "agents/at_gate", "agents/waiting")
            if name in rows[0]
        },
        **flow,
    }


def check_size(
    schedule: Schedule, end: tuple[str, int], value: object, mode: str, skip: int
) -> None:
    """Raise ConfigError if no version of a run is in `counted`. `end` has its key and samples."""
    key, total = end
    if not counted(total, skip, schedule):
        versions, window = schedule.versions(total), schedule.window
        least = next(n for n in itertools.count(window, window) if counted(n, skip, schedule))
        rule = (
            f"the run has {versions} versions in mode {mode}, and in all of them the pipeline "
            "fills or drains, or --skip leaves them out"
        )
        fix = f"{least} or more samples"
        raise bad_value(key, value, rule, fix)


def _with_ceilings(
    measured: dict[str, Any],
    arm: Arm,
    turn: int,
    s: Session,
    rate: float,
    alone: float,
) -> dict[str, Any]:
    """Return the figures, extended by their shares of the devices' limits.

    The limits are the matmul rate, and the decoding speed without training.
    """
    flops = train_flops(s.run.model, _lengths(s), s.config.model)
    per_sample = flops / _samples(s)
    stepping = measured["step_s"] / measured["version_s"]
    mfu = measured["samples_per_s"] * per_sample / (arm.trainers * rate) / stepping
    decoding = measured["drawn_tokens_per_s"] / alone
    return (
        names_of(arm, turn)
        | measured
        | {
            "matmul_tflops": rate / 1e12,
            "mfu_in_steps": mfu,
            "alone_tokens_per_s": alone,
            "share_of_alone": decoding,
        }
    )


def names_of(arm: Arm, turn: int) -> Figures:
    """Return the figures that name a run."""
    return {
        "arm": str(arm),
        "mode": arm.mode,
        "trainers": arm.trainers,
        "rollouts": arm.rollouts,
        "turn": turn,
    }


def _lengths(s: Session) -> list[int]:
    """Return the length of every trajectory of the run, prompt and response, in tokens.

    A response has its drawn length, or the length limit if the recipe draws no lengths.
    """
    config = s.config
    drawn, n = drawn_lengths(config.rollout), config.rollout.n
    limit = config.rollout.max_response_length
    lengths = []
    for i in range(_samples(s)):
        prompt = len(s.problems.train[i].tokens)
        lengths += [
            prompt + (drawn.of(request_seed(config.trainer.seed, i, k)) if drawn else limit)
            for k in range(n)
        ]
    return lengths


async def _alone(s: Session) -> float:
    """Return the tokens per second of the same engines without training.

    As many requests as the mode may have in flight run at once, each with its own length.
    """
    config = s.config
    drawn, rollout = drawn_lengths(config.rollout), config.rollout

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


def figures_of_flow(run: RunReader, versions: range) -> dict[str, Any]:
    """Return the flow over the counted versions, the change of the stock, and the advice.

    The stock is the samples that are finished and not yet taken by the trainer. A rate of training
    that takes from it, or adds to it, cannot continue. Without the accounts, because the disk was
    full, there is no stock and no advice.
    """
    if run.config is None or not versions:
        return {}
    counted = [run.rows[k + 1] for k in versions]
    wall = sum(row["perf/time_per_version"] for row in counted)
    trained = sum(row["response_length/mean"] * row["train/samples"] for row in counted)
    flow: dict[str, Any] = {"trained_responses_per_s": trained * run.config.rollout.n / wall}
    lines = {line.version: line for line in run.accounts}
    if not all(k in lines for k in (versions.start, versions.stop)):
        return flow
    before, after = lines[versions.start], lines[versions.stop]

    def more(*states: str) -> int:
        return sum(after.samples.get(s, 0) - before.samples.get(s, 0) for s in states)

    samples, advice = sum(row["train/samples"] for row in counted), advise(run)
    return flow | {
        "more_ready": more("ready"),
        "more_running": more("waiting", "running"),
        "stock_share": more("ready") / max(1, samples),
        "advice": [str(one) for one in advice],
        "gain": advice[0].gain,
        "overrides": list(advice[0].overrides),
    }


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of medians over repeats, fastest first.

    Ratios are relative to the fastest split of colocate_sync with the same lengths. Without such an
    arm, they are relative to the slowest arm with the same lengths.
    """
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for run in figures:
        by_arm.setdefault(run["arm"], []).append(run)
    middle = {
        arm: {
            k: statistics.median(r[k] for r in runs)
            for k in runs[0]
            # One of several runs may lack a figure, such as the gain of its advice.
            if all(isinstance(r.get(k), float) for r in runs)
        }
        for arm, runs in by_arm.items()
    }
    rates = {arm: m["samples_per_s"] for arm, m in middle.items()}

    def baseline(uniform: bool) -> float:
        alike = {arm: rate for arm, rate in rates.items() if arm.endswith(", uniform") == uniform}
        base = [rate for arm, rate in alike.items() if by_arm[arm][0]["mode"] == "colocate_sync"]
        return max(base) if base else min(alike.values())

    head = (
        "| arm | samples/s | ratio | drawn tokens/s | trained tokens/s | stock | idle trainer | idle rollouter | version s | step s "
        "| transfer s | pause s | staleness | MFU in steps | of rollouts alone | read per drawn |"
    )
    rows = [head, "|---" + "|--:" * 15 + "|"]
    for arm in sorted(middle, key=lambda a: -rates[a]):
        m = middle[arm]
        ratio = m["samples_per_s"] / baseline(arm.endswith(", uniform"))
        rows.append(
            f"| {arm} | {m['samples_per_s']:.2f} | {ratio:.2f} | {m['drawn_tokens_per_s']:.0f} "
            f"| {m.get('trained_responses_per_s', 0):.0f} | {_stock(m)} | {m['trainer_idle']:.0%} "
            f"| {m['rollouter_idle']:.0%} | {m['version_s']:.2f} | {m['step_s']:.2f} "
            f"| {m['sync_transfer_s']:.3f} | {m['sync_pause_s']:.3f} | {m['staleness']:.2f} "
            f"| {m['mfu_in_steps']:.0%} | {m['share_of_alone']:.0%} "
            f"| {m['read_per_drawn']:.2f} |"
        )
    return "\n".join(rows)


def _stock(figures: dict[str, float]) -> str:
    """Return the change of the stock of finished samples, as a share of the trained ones."""
    return f"{figures['stock_share']:+.0%}" if "stock_share" in figures else "-"


def remarks(figures: Sequence[dict[str, Any]]) -> list[str]:
    """Return a warning for each run whose stock changed, and the advice for each arm."""
    lines = []
    for run in figures:
        share = run.get("stock_share", 0.0)
        if abs(share) > MOST_STOCK:
            side = "more" if share < 0 else "fewer"
            lines.append(
                f"warning: {run['arm']}: the stock of finished samples changed by "
                f"{run['more_ready']:+d}, {share:+.0%} of those trained in the counted versions. "
                f"The run trained {side} samples than it drew: compare drawn tokens, or take a "
                "longer run"
            )
    last = {run["arm"]: run for run in figures}
    lines += [
        f"advice: {arm}: {text}" for arm, run in last.items() for text in run.get("advice", [])
    ]
    return lines
