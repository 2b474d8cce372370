"""Find the best split, slots and staleness of each mode by simulation.

The loops and the Ledger are real, the clock is virtual, and the costs were measured.

    python benchmarks/simulate_modes.py --gpus 8 [--modes async_partial,async_swap]
        [--staleness 2,3,4] [--slots 48,64,96] [--best 5]

It simulates every split with each number of slots and each staleness, relative to colocate_sync on
all GPUs, and prints the best of each mode. The workload is that of shapes/qwen2_7b. The costs come
from its run on 3+1 H200s (results/gpus.md). `--check` compares the simulation with that run and
with a later run on 2+2.

| cost | value |
|---|---|
| decoding | 4.5 ms for a step of an engine, plus 25 microseconds for each of its slots |
| reading | 28 microseconds per token |
| training | 73 microseconds per token, divided by the GPUs that train, plus 0.4 s per step |
| sync | 0.08 s, colocated 0.28 s; 0.02 s of pause |

If the trainer waits for a whole window, a third of the slots is busy on average, because the
longest response has three times the mean length. An engine reads one request after the other, so
each waits for half of the tokens that its slots have to read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import track

from millrace.config import recipe
from millrace.extras.bench.modes import counted
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.turns import turns_of
from millrace.replicas.pool import RolloutPool
from millrace.rollout.episode import SingleTurn
from millrace.rollout.sample import SampleRoller
from millrace.run.train import drawn_lengths
from millrace.schedule.ledger import Ledger
from millrace.schedule.modes import MODES
from millrace.schedule.schedule import OnSync
from millrace.simulate import clock
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimReward, SimRolloutEngine, SimTrainEngine, SimWeightSync
from millrace.types import Prompt, SamplingParams, tokens_of

RECIPE = "shapes/qwen2_7b"
CONFIG = recipe.load(RECIPE, [])
WINDOW, N, LENGTHS = (
    CONFIG.actor.ppo_mini_batch_size,
    CONFIG.rollout.n,
    drawn_lengths(CONFIG.rollout),
)
MEASURED = Path(__file__).parent / "results" / "gpu_modes.jsonl"
MEASURED_RUNS = {
    "7B, four GPUs, slots 320, staleness 4.0": 320,
    "7B, four GPUs, 2+2, slots 88, staleness 4.0": 88,
}
"""Number of slots of each run."""
FIRST_LIKE_THE_REST = 3
"""First counted version of an arm that has no figures, because a time limit ended it."""


class Prompts:
    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, tokens_of([1] * 10), "", "simulated")


@dataclass
class Rows:
    """An Observer that keeps the metrics of versions."""

    rows: list[dict[str, float]] = field(default_factory=list)

    def published(self, *_: Any) -> None: ...

    def row(self, version: int, row: dict[str, float]) -> None:
        self.rows.append(row)

    def checkpoint_due(self, version: int) -> bool:
        return False

    async def checkpoint(self, *_: Any, **__: Any) -> None: ...

    async def validated(self) -> None: ...

    def validate(self, version: int) -> None: ...


def simulate(
    mode: str, trainers: int, rollouts: int, *, slots: int, staleness: float, versions: int = 16
) -> tuple[float, float, float]:
    """Return the time of a window and the idle shares.

    The tuple is (seconds for a window's samples, idle share of the trainer, idle share of the
    rollouts). Versions in which the pipeline fills or drains do not count.
    """
    schedule = recipe.load(
        RECIPE, [f"async_training.staleness_threshold={staleness}"], [f"mode={mode}"]
    ).schedule
    colocated = schedule.colocated
    busy = min(slots, math.ceil(schedule.capacity * N / rollouts))
    cost = CostModel(
        token_s=0.0045 + 2.5e-5 * (busy / 3 if schedule.on_sync is OnSync.DRAIN else busy),
        prefill_token_s=2.8e-5 * busy / 2,
        train_token_s=7.3e-5 / trainers,
        step_s=0.4,
        transfer_s=0.28 if colocated else 0.08,
        pause_s=0.02,
        switch_s=0.0,
    )

    async def run() -> list[dict[str, float]]:
        ledger = Ledger(schedule, versions * WINDOW)
        queue, kept = SampleQueue(ledger, deadline_s=1e8), Rows()
        engines = [SimRolloutEngine(cost, slots=slots) for _ in range(rollouts)]
        params = SamplingParams(max_tokens=CONFIG.rollout.max_response_length)
        roller = SampleRoller(
            SingleTurn(),
            SimReward(cost),
            lambda _: "",
            params,
            N,
            seed=0,
            lengths=LENGTHS,
        )
        rollouter = Rollouter(queue, Prompts(), RolloutPool(engines), roller)
        train, sync = SimTrainEngine(cost), SimWeightSync(cost, engines)
        turns = turns_of(colocated, rollouter.pool, train)
        trainer = Trainer(queue, rollouter, train, turns, sync, kept)
        await trainer.begin()
        await run_pipeline(rollouter, trainer)
        return [row for row in kept.rows if "perf/time_per_version" in row]

    rows = clock.run(run())
    rows = [rows[k] for k in counted(versions * WINDOW, 1, schedule)]
    wall = sum(row["perf/time_per_version"] for row in rows)
    idle = [
        sum(row[name] * row["perf/time_per_version"] for row in rows) / wall
        for name in ("trainer/idle_ratio", "rollouter/idle_ratio")
    ]
    return wall / len(rows) * WINDOW / schedule.window, idle[0], idle[1]


def measured(run: str) -> dict[str, float]:
    """Return seconds for a window's samples, by arm."""
    lines = [
        line for line in map(json.loads, MEASURED.read_text().splitlines()) if line["run"] == run
    ]
    rows: dict[str, list[float]] = {}
    for line in lines:
        if line.get("row of version", 0) >= FIRST_LIKE_THE_REST:
            rows.setdefault(line["arm"], []).append(line["perf/time_per_version"])
    whole = {f["arm"]: WINDOW / f["samples_per_s"] for f in lines if "samples_per_s" in f}
    return {
        arm: seconds
        for arm, seconds in ({arm: mean(s) for arm, s in rows.items()} | whole).items()
        if "uniform" not in arm
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--modes", default="async_partial,async_swap")
    parser.add_argument("--staleness", default="2,3,4")
    parser.add_argument("--slots", default="48,64,96,128,192,320")
    parser.add_argument("--best", type=int, default=5, help="rows of each mode")
    parser.add_argument(
        "--check", action="store_true", help="simulate what was measured on four GPUs instead"
    )
    options = parser.parse_args()
    if options.check:
        print(
            f"| arm | slots | seconds for {WINDOW} samples, measured | simulated |\n|---|--:|--:|--:|"
        )
        for run, slots in MEASURED_RUNS.items():
            for arm, seconds in measured(run).items():
                mode, split = arm.replace(" on 4", " 4+4").split()
                trainers, rollouts = map(int, split.split("+"))
                simulated = simulate(mode, trainers, rollouts, slots=slots, staleness=4)[0]
                print(f"| {arm} | {slots} | {seconds:.2f} | {simulated:.2f} |")
        return
    base = simulate("colocate_sync", options.gpus, options.gpus, slots=320, staleness=0)[0]
    print(f"colocate_sync on {options.gpus}: {base:.2f} s\n")
    head = f"| arm | slots | staleness | of colocate_sync | seconds for {WINDOW} samples | trainer idle | rollouts idle |"
    print(f"{head}\n|---|--:|--:|--:|--:|--:|--:|")
    for mode in options.modes.split(","):
        results = []
        fixed = MODES[mode].staleness_threshold
        ages = options.staleness.split(",") if fixed is None else [fixed]
        cases = itertools.product(
            range(1, options.gpus), map(int, options.slots.split(",")), map(float, ages)
        )
        for rollouts, slots, staleness in track(
            list(cases), mode, console=Console(stderr=True), transient=True
        ):
            arm = f"{mode} {options.gpus - rollouts}+{rollouts} | {slots} | {staleness:g}"
            results.append(
                (
                    simulate(
                        mode, options.gpus - rollouts, rollouts, slots=slots, staleness=staleness
                    ),
                    arm,
                )
            )
        for (seconds, trainer, rollout), arm in sorted(results)[: options.best]:
            print(
                f"| {arm} | {base / seconds:.2f} | {seconds:.2f} | {trainer:.0%} | {rollout:.0%} |"
            )


if __name__ == "__main__":
    main()
