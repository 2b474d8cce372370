"""Whole runs on the virtual clock, with the files that advice reads, from keys of a recipe."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from millrace.config import Config, ReportConfig, recipe
from millrace.persist.run_reader import RunReader
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.turns import turns_of
from millrace.replicas.pool import RolloutPool
from millrace.report.record import Devices, EventRecorder
from millrace.rollout.episode import SingleTurn
from millrace.rollout.lengths import DrawnLengths
from millrace.rollout.retry import RetryingReward
from millrace.rollout.sample import SampleRoller
from millrace.schedule.ledger import Ledger
from millrace.simulate import clock
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimReward, SimRolloutEngine, SimTrainEngine, SimWeightSync
from millrace.types import Completion, Prompt, SamplingParams, Score, tokens_of
from millrace.waits.registry import current

COST = CostModel(
    token_s=0.01, request_s=1e-9, train_token_s=2e-4, step_s=0.1, transfer_s=0.05, pause_s=0.02
)
"""A decode step takes 10 ms for any number of requests, and training is cheap."""
KEYS = (
    *("mode=async_partial", "actor.ppo_mini_batch_size=8", "rollout.n=4", "rollout.test_freq=0"),
    *("async_training.trigger_parameter_sync_step=1", "async_training.staleness_threshold=2"),
    *("rollout.max_num_seqs=16", "rollout.max_response_length=1024", "trainer.save_freq=0"),
    *("rollout.drawn_lengths.enable=true", "rollout.drawn_lengths.median=250"),
    "rollout.drawn_lengths.sigma=0.8",
)


class Workers:
    """A reward that a number of processes compute, one call each."""

    def __init__(self, reward: SimReward, workers: int) -> None:
        self._reward, self._free = reward, asyncio.Semaphore(workers)

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        async with self._free:
            return await self._reward.score(prompt, completions)

    async def close(self) -> None:
        return None


class Prompts:
    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, tokens_of([1] * 10), str(index), "sim")


@dataclass
class Kept:
    """An Observer that keeps rows and takes the seconds of checkpoints and validations."""

    config: Config
    validation_s: float
    save_s: float
    rows: list[dict[str, float]] = field(default_factory=list)
    validation: asyncio.Task[None] | None = None

    def published(self, *_: Any) -> None: ...

    def row(self, version: int, row: dict[str, float]) -> None:
        self.rows.append(row)

    def checkpoint_due(self, version: int) -> bool:
        freq = self.config.trainer.save_freq
        return freq > 0 and version % freq == 0

    async def checkpoint(self, *_: Any, **__: Any) -> None:
        await asyncio.sleep(self.save_s)

    async def validated(self) -> None:
        if self.validation is not None:
            await self.validation
            self.validation = None

    def validate(self, version: int) -> None:
        freq = self.config.test_freq
        if freq and version % freq == 0:
            self.validation = asyncio.ensure_future(asyncio.sleep(self.validation_s))


def simulated(
    folder: Path,
    keys: Sequence[str] = (),
    cost: CostModel = COST,
    *,
    versions: int = 18,
    validation_s: float = 0.0,
    save_s: float = 0.0,
) -> RunReader:
    """Simulate a run of a recipe into a folder, with the real loops and the real writers."""
    folder.mkdir(parents=True)
    config = recipe.load("quickstart", [*KEYS, *keys])
    kept = Kept(config, validation_s, save_s)
    clock.run(_run(folder, config, cost, versions, kept))
    lines = [json.dumps({"version": k, **row}) for k, row in enumerate(kept.rows, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(recipe.dump(config))
    (folder / ".millrace-run").write_text("a test made this folder\n")
    return RunReader(folder).read()


async def _run(folder: Path, config: Config, cost: CostModel, versions: int, kept: Kept) -> None:
    schedule, rollout, drawn = config.schedule, config.rollout, config.rollout.drawn_lengths
    ledger = Ledger(schedule, versions * schedule.window)
    devices = Devices(config.trainer.ranks, {f"rollout-{i}": 1 for i in range(rollout.replicas)})
    options = ReportConfig(trace=False, samples=0.0)
    loop = asyncio.get_running_loop()
    recorder = EventRecorder(
        folder, 1, ledger, {}, devices, options, loop.time, lambda note: None, lambda tokens: ""
    )
    queue = SampleQueue(ledger, deadline_s=1e8)
    engines = [SimRolloutEngine(cost, slots=rollout.max_num_seqs) for _ in range(rollout.replicas)]
    workers = Workers(SimReward(cost), config.reward.num_workers or 1 << 20)
    roller = SampleRoller(
        SingleTurn(),
        RetryingReward(workers, 0),
        lambda tokens: "",
        SamplingParams(max_tokens=rollout.max_response_length),
        rollout.n,
        seed=0,
        lengths=DrawnLengths(drawn.median, drawn.sigma, rollout.max_response_length),
    )
    rollouter = Rollouter(queue, Prompts(), RolloutPool(engines), roller)
    train = SimTrainEngine(replace(cost, share=config.trainer.ranks))
    turns = turns_of(schedule.colocated, rollouter.pool, train)
    trainer = Trainer(queue, rollouter, train, turns, SimWeightSync(cost, engines), kept)
    with current().registry.watched_by(*recorder.watchers):
        await trainer.begin()
        await run_pipeline(rollouter, trainer)
