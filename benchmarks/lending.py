"""Simulates trainers that lend their devices to replicas while they wait.

    python benchmarks/lending.py [--jobs N] [--out FILE.jsonl]

Each device of the trainer has a replica too. It draws while the trainer waits for samples, and its
requests go on elsewhere from the start of a step. Weights of both sides fit at once. The real loops
and the real Ledger run on the virtual clock. Costs are those of H200s: SmolLM2's are calibrated
(results/planning.md), and the others are round figures of docs/vllm.md and docs/gpus.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from millrace.extras.plan.simulation import MeasuredLengths, Rows, _Prompts
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.turns import DeviceSharing
from millrace.ports import StepReport, TrainBatch
from millrace.replicas.pool import RolloutPool
from millrace.replicas.roster import Roster
from millrace.rollout.episode import SingleTurn
from millrace.rollout.lengths import DrawnLengths
from millrace.rollout.sample import SampleRoller
from millrace.schedule.ledger import Ledger
from millrace.schedule.schedule import OnSync, Schedule
from millrace.schedule.steady import counted
from millrace.simulate import clock
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimReward, SimRolloutEngine, SimTrainEngine, SimWeightSync
from millrace.types import SamplingParams

STALENESS = (0.5, 1.0, 2.0)
TAKE_S = (0.0, 0.3)
"""Seconds in which the trainer takes its devices back."""


@dataclass(frozen=True)
class Shape:
    devices: int
    prompts: int
    """In an optimizer step, with eight answers each."""
    slots: int
    cost: CostModel
    lengths: DrawnLengths


def costs(
    token_s: float, request_s: float, token: float, step_s: float, **more: float
) -> CostModel:
    about = {"transfer_s": 0.15, "pause_s": 0.02, "reward_s": 0.01, "prefill_token_s": 4e-5} | more
    return CostModel(
        token_s=token_s, request_s=request_s, train_token_s=token, step_s=step_s, serial_reads=True,
        **about,
    )  # fmt: skip


SUMS = ((0.0, 4.8), (0.5, 15.5), (0.9, 36.0), (0.99, 50.0), (1.0, 69.0))
SHAPES = {
    "SmolLM2, sums, 2 GPUs": Shape(
        *(2, 32, 512, costs(0.0011, 5.3e-5, 1e-9, 0.184, transfer_s=0.025, prefill_token_s=0.0)),
        MeasuredLengths(15, 0.0, 96, SUMS),
    ),
    "1.5B, median 250, sigma 0.8, 2 GPUs": Shape(
        *(2, 32, 256, costs(0.0037, 1.5e-5, 1 / 26000, 0.1)), DrawnLengths(250, 0.8, 1024)
    ),
    "3B, median 400, sigma 1, 2 GPUs": Shape(
        *(2, 32, 256, costs(0.007, 2.5e-5, 1 / 13000, 0.15)), DrawnLengths(400, 1.0, 4096)
    ),
    "7B, median 300, sigma 0.8, 8 GPUs": Shape(
        *(8, 64, 128, costs(0.008, 2.4e-5, 1 / 6500, 0.2)), DrawnLengths(300, 0.8, 2048)
    ),
}


class Lenders(Roster):
    """A roster in which lent replicas serve nothing while the trainer computes."""

    def __init__(self, count: int, lent: int) -> None:
        super().__init__(count)
        self.lent = range(count - lent, count)
        self.at_work = False

    @property
    def live(self) -> list[int]:
        return [i for i in super().live if not (self.at_work and i in self.lent)]


class LendingEngine(SimTrainEngine):
    """A train engine that has its devices for the seconds of its steps."""

    def __init__(self, cost: CostModel, pool: RolloutPool, lenders: Lenders, take_s: float) -> None:
        super().__init__(cost)
        self._pool, self._lenders, self._take_s = pool, lenders, take_s

    async def step(self, batch: TrainBatch) -> StepReport:
        self._lenders.at_work = True
        await asyncio.gather(*map(self._pool.interrupt_on, self._lenders.lent))
        await asyncio.sleep(self._take_s if self._lenders.lent else 0.0)
        try:
            return await super().step(batch)
        finally:
            self._lenders.at_work = False


def version_s(shape: Shape, trainers: int, staleness: float, lent: bool, take_s: float) -> float:
    """Return the seconds of a version of two optimizer steps in async_partial."""
    schedule = Schedule(
        ppo_mini_batch_size=shape.prompts,
        trigger_parameter_sync_step=2,
        staleness_threshold=staleness,
        on_sync=OnSync.INTERRUPT,
    )
    schedule = replace(schedule, lookahead=schedule.window)
    cost = replace(shape.cost, train_token_s=shape.cost.train_token_s / trainers)
    samples = (5 + 2 * math.ceil(schedule.capacity / schedule.window)) * schedule.window

    async def run() -> list[dict[str, float]]:
        queue, kept = SampleQueue(Ledger(schedule, samples), deadline_s=1e8), Rows()
        count = shape.devices - (0 if lent else trainers)
        engines = [SimRolloutEngine(cost, slots=shape.slots) for _ in range(count)]
        lenders = Lenders(count, trainers if lent else 0)
        pool = RolloutPool(engines, lenders)
        limit = SamplingParams(max_tokens=shape.lengths.limit)
        parts = SingleTurn(), SimReward(cost), lambda _: "", limit, 8
        roller = SampleRoller(*parts, seed=0, lengths=shape.lengths)
        rollouter = Rollouter(queue, _Prompts(6), pool, roller)
        train, sync = LendingEngine(cost, pool, lenders, take_s), SimWeightSync(cost, engines)
        trainer = Trainer(queue, rollouter, train, DeviceSharing(), sync, kept)
        await trainer.begin()
        await run_pipeline(rollouter, trainer)
        return [row for row in kept.rows if "perf/time_per_version" in row]

    rows = clock.run(run())
    chosen = [rows[k]["perf/time_per_version"] for k in counted(samples, 1, schedule)]
    return sum(chosen) / len(chosen)


def best(case: tuple[str, float, bool, float]) -> dict[str, Any]:
    """Return the best split of a case."""
    name, staleness, lent, take_s = case
    shape = SHAPES[name]
    found = min(
        (version_s(shape, t, staleness, lent, take_s), t)
        for t in range(1, shape.devices // 2 + 2 if shape.devices > 2 else 2)
    )
    return {
        "shape": name, "staleness": staleness, "lent": lent, "take_s": take_s,
        "seconds": found[0], "trainers": found[1],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the rows to this file as JSON lines")
    options = parser.parse_args()
    ways = [(False, 0.0), *((True, take) for take in TAKE_S)]
    cases = [(n, s, *way) for n, s, way in product(SHAPES, STALENESS, ways)]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as jobs:
        rows = jobs.map(best, cases, chunksize=1)
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print("| shape | staleness | fixed split, s a version | lent | lent, taken back in 0.3 s |")
    print("|---|--:|--:|--:|--:|")
    for k in range(0, len(rows), 3):
        fixed, *lent = rows[k : k + 3]
        gains = " | ".join(f"{fixed['seconds'] / row['seconds'] - 1:+.0%}" for row in lent)
        print(f"| {fixed['shape']} | {fixed['staleness']:g} | {fixed['seconds']:.2f} | {gains} |")


if __name__ == "__main__":
    main()
