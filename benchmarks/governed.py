"""Compares a governor of the staleness with fixed values of it, in seconds to a reward.

    python benchmarks/governed.py rates [--costs FILE] [--out FILE.jsonl]
    python benchmarks/governed.py learn [--costs FILE] [--out FILE.jsonl] [--seeds N] [--jobs N]
    python benchmarks/governed.py table FILE.jsonl

Both parts run the real loops and the real Ledger on the virtual clock, so the machine's speed changes
nothing. `rates` has samples a second. In `learn`, the train engine also learns: it draws the response
of every trajectory with the weights of the versions that the simulation gave its tokens, and makes
the real optimizer step. The task, the loss and the start model are those of the quickstart. `--costs`
has the quickstart's, from `millrace calibrate`. Those of H200s are the shapes of lending.py.

A GovernedLedger admits fewer samples than its capacity. Everything else is the package's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from governed_learner import Learner, LearningEngine, LearningSync, ess_of, start_model, to_reward
from lending import SHAPES, Shape

from millrace.extras.plan import costs as plan_costs
from millrace.extras.plan.simulation import Rows, _Prompts, measured_lengths
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.turns import DeviceSharing
from millrace.replicas.pool import RolloutPool
from millrace.rollout.episode import SingleTurn
from millrace.rollout.lengths import DrawnLengths
from millrace.rollout.sample import SampleRoller
from millrace.schedule.ledger import Ledger, Topic
from millrace.schedule.schedule import OnSync, Schedule
from millrace.simulate import clock
from millrace.simulate.engines import SimReward, SimRolloutEngine
from millrace.types import SamplingParams

FIXED = ("0", "0.1", "0.3", "0.5", "1", "2")
LEARNED = ("0", "0.5", "1", "2", "auto", "strict")
CEILING = 2.0
TARGETS = (0.7, 0.75, 0.8, 0.85)


@dataclass
class Governor:
    """The staleness of the next version, from the row of the last one.

    | the row shows | staleness |
    |---|---|
    | an effective share of tokens under `least_ess`, or k3 over `most_k3` | `step` less |
    | a trainer that waits over 5 % of the time, and rollouts with over 5 % free | `step` more |
    | a trainer that waits under 1 % of the time | half a step less |

    The first line that is true counts. The result is from 0 to the ceiling.
    """

    ceiling: float = CEILING
    now: float = 0.5
    step: float = 0.25
    least_ess: float = 0.8
    most_k3: float = 0.05

    def next(self, row: dict[str, float]) -> float:
        waits = row.get("timing_s/wait_samples", 0.0) + row.get("timing_s/wait_prev_gen", 0.0)
        waits /= row["perf/time_per_version"]
        change = 0.0
        if ess_of(row) < self.least_ess or row.get("actor/k3_to_sampler", 0.0) > self.most_k3:
            change = -self.step
        elif waits > 0.05 and row["rollouter/idle_ratio"] > 0.05:
            change = self.step
        elif waits < 0.01:
            change = -self.step / 2
        self.now = min(self.ceiling, max(0.0, self.now + change))
        return self.now


GOVERNORS: dict[str, Callable[[], Governor]] = {
    "auto": Governor,
    "strict": partial(Governor, least_ess=0.95, most_k3=0.015),
}


class GovernedLedger(Ledger):
    """A Ledger that admits at most `most` samples, which is never over its capacity."""

    def __init__(self, schedule: Schedule, limit: int) -> None:
        super().__init__(schedule, limit)
        self.most = schedule.capacity

    def can_admit(self) -> bool:
        return self.occupied < self.most and super().can_admit()

    def govern(self, staleness: float) -> None:
        self.most = min(
            self.schedule.capacity, replace(self.schedule, staleness_threshold=staleness).capacity
        )
        self.changed.add(Topic.SLOTS)


@dataclass(frozen=True)
class Growing(DrawnLengths):
    """Lengths that grow by a factor during the run. `progress` is from 0 to 1."""

    by: float = 4.0
    progress: list[float] = field(default_factory=lambda: [0.0])

    def of(self, seed: int) -> int:
        drawn = DrawnLengths(self.median, self.sigma, self.limit).of(seed)
        return max(1, min(self.limit, round(drawn * self.by ** self.progress[0])))


def shapes(costs: Path | None) -> dict[str, Shape]:
    """Return the shapes by name. Each has two devices."""
    long = SHAPES["1.5B, median 250, sigma 0.8, 2 GPUs"]
    found = {
        "SmolLM2, sums": SHAPES["SmolLM2, sums, 2 GPUs"],
        "1.5B, long tail": long,
        "1.5B, equal lengths": replace(long, lengths=DrawnLengths(250, 0.0, 1024)),
        "1.5B, lengths grow fourfold": replace(long, lengths=Growing(120, 0.8, 2048)),
    }
    if costs is not None:
        known = plan_costs.load(costs)
        model = known.model_of(schedule_of(32, 0.5), n=8, trainers=1, read=6)
        found["quickstart"] = Shape(2, 32, 256, model, measured_lengths(known.lengths, 8))
    return found


def schedule_of(prompts: int, staleness: float) -> Schedule:
    one = Schedule(
        ppo_mini_batch_size=prompts,
        trigger_parameter_sync_step=2,
        staleness_threshold=staleness,
        on_sync=OnSync.INTERRUPT,
    )
    return replace(one, lookahead=one.window if staleness else 1)


class Governing(Rows):
    """Rows that govern the Ledger, and measure the reward of each version."""

    def attach(self, queue: SampleQueue, shape: Shape, arm: str, learner: Learner | None) -> None:
        self.queue, self.shape, self.learner = queue, shape, learner
        self.governor = GOVERNORS[arm]() if arm in GOVERNORS else None
        self.curve: list[dict[str, float]] = []

    def row(self, version: int, row: dict[str, float]) -> None:
        super().row(version, row)
        ledger = self.queue.ledger
        if isinstance(self.shape.lengths, Growing):
            self.shape.lengths.progress[0] = ledger.retired / (ledger.limit or 1)
        point = {"samples": float(ledger.retired), "seconds": asyncio.get_running_loop().time()}
        names = ("trainer/idle_ratio", "rollouter/idle_ratio", "staleness/mean")
        point |= {name: round(row.get(name, 0.0), 4) for name in names}
        if self.learner:
            point["reward"] = self.learner.held_out(version)
            point |= {"ess": ess_of(row), "k3": row.get("actor/k3_to_sampler", 0.0)}
        if self.governor and isinstance(ledger, GovernedLedger):
            point["auto"] = self.governor.next(row)
            self.queue.do(ledger.govern, point["auto"])
        self.curve.append(point)


def run(
    shape: Shape, arm: str, versions: int, learner: Learner | None = None
) -> list[dict[str, float]]:
    """Return the points of a run in async_partial on two devices: one for each version."""
    schedule = schedule_of(shape.prompts, CEILING if arm in GOVERNORS else float(arm))
    if isinstance(shape.lengths, Growing):
        shape.lengths.progress[0] = 0.0

    async def simulated() -> list[dict[str, float]]:
        ledger = GovernedLedger(schedule, versions * schedule.window)
        queue, kept = SampleQueue(ledger, deadline_s=1e8), Governing()
        kept.attach(queue, shape, arm, learner)
        if kept.governor:
            ledger.govern(kept.governor.now)
        engines = [SimRolloutEngine(shape.cost, slots=shape.slots)]
        limit = SamplingParams(max_tokens=shape.lengths.limit)
        parts = SingleTurn(), SimReward(shape.cost), lambda _: "", limit, 8
        seed = learner.seed if learner else 0
        roller = SampleRoller(*parts, seed=seed, lengths=shape.lengths)
        rollouter = Rollouter(queue, _Prompts(6), RolloutPool(engines), roller)
        train, sync = LearningEngine(shape.cost), LearningSync(shape.cost, engines)
        if learner:
            train.learner, sync.keep_weights = learner, learner.keep
        trainer = Trainer(queue, rollouter, train, DeviceSharing(), sync, kept)
        await trainer.begin()
        await run_pipeline(rollouter, trainer)
        return kept.curve

    return clock.run(simulated())


def rate(curve: list[dict[str, float]]) -> float:
    """Return samples a second over an even number of versions: fast and slow ones alternate."""
    first, last = curve[3], curve[-5]
    return (last["samples"] - first["samples"]) / (last["seconds"] - first["seconds"])


def learned(case: tuple[str, str, int, str], costs: Path | None, versions: int) -> dict[str, Any]:
    """Return a run that learns, from the start model of its seed."""
    name, arm, seed, model = case
    torch.set_num_threads(1)
    shape = shapes(costs)[name]
    with TemporaryDirectory() as folder:
        learner = Learner(model, seed, folder)
        curve = run(shape, arm, versions, learner)
    return {"part": "learn", "shape": name, "arm": arm, "seed": seed, "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("rates", "learn", "table"))
    parser.add_argument("files", nargs="*", type=Path, help="rows of earlier runs, for `table`")
    parser.add_argument("--costs", type=Path, help="those of the quickstart")
    parser.add_argument(
        "--shapes", nargs="*", help="some of the shapes, by the start of their names"
    )
    parser.add_argument("--models", type=Path, help="keep the start models here, or take them")
    parser.add_argument("--versions", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="add the rows to this file as JSON lines")
    options = parser.parse_args()
    if options.part == "table":
        text = "".join(path.read_text() for path in options.files)
        show([json.loads(line) for line in text.splitlines()])
        return
    names = [n for n in shapes(options.costs) if n.startswith(tuple(options.shapes or [""]))]
    rows = []
    for row in made_rows(options, names, options.versions):
        rows.append(row)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    show(rows)


def made_rows(
    options: argparse.Namespace, names: list[str], versions: int
) -> Iterator[dict[str, Any]]:
    if options.part == "rates":
        for name, arm in product(names, [*FIXED, *GOVERNORS]):
            curve = run(shapes(options.costs)[name], arm, versions)
            labels = {"part": "rates", "shape": name, "arm": arm}
            yield labels | {"rate": rate(curve), "curve": curve}
        return
    with (
        TemporaryDirectory() as temporary,
        multiprocessing.get_context("spawn").Pool(options.jobs) as jobs,
    ):
        seeds, folder = range(options.seeds), options.models or Path(temporary)
        models = [start_model(folder / str(seed), seed) for seed in seeds]
        each = product(seeds, names, LEARNED)
        cases = [(name, arm, seed, models[seed]) for seed, name, arm in each]
        yield from jobs.imap(partial(learned, costs=options.costs, versions=versions), cases)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the samples a second, then the mean samples and seconds to each target."""
    for part, name in dict.fromkeys((row["part"], row["shape"]) for row in rows):
        mine = [row for row in rows if (row["part"], row["shape"]) == (part, name)]
        arms = list(dict.fromkeys(row["arm"] for row in mine))
        print(f"{part}: {name} | {' | '.join(arms)}")
        if part == "rates":
            print(" | ".join(f"{row['rate']:.2f}" for row in mine))
            continue
        for target, axis in product(TARGETS, ("samples", "seconds")):
            means = {
                arm: statistics.mean(
                    to_reward(row["curve"], target, axis) for row in mine if row["arm"] == arm
                )
                for arm in arms
            }
            shown = " | ".join(f"{means[arm]:.4g}" for arm in arms)
            best = min((means[arm] for arm in arms if arm not in GOVERNORS), default=math.inf)
            won = [f"{arm} {means[arm] / best - 1:+.1%}" for arm in GOVERNORS if arm in means]
            print(f"{axis} to {target} | {shown} | {', '.join(won)}")


if __name__ == "__main__":
    main()
