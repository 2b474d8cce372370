"""Whole runs on the virtual clock, with the figures that advice reads."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from millrace.config import ReportConfig
from millrace.persist.run_reader import RunReader
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.turns import turns_of
from millrace.replicas.pool import RolloutPool
from millrace.report.advice.measure import Measured, Setup, measured_of
from millrace.report.record import Devices, EventRecorder
from millrace.rollout.dynamic_sampling import DynamicSampling
from millrace.rollout.episode import SingleTurn
from millrace.rollout.lengths import DrawnLengths
from millrace.rollout.retry import RetryingReward
from millrace.rollout.sample import SampleRoller
from millrace.schedule.ledger import Ledger
from millrace.schedule.modes import MODES
from millrace.schedule.schedule import Schedule
from millrace.schedule.steady import counted
from millrace.simulate import clock
from millrace.simulate.cost import CostModel
from millrace.simulate.decode_speed import DecodeSpeed
from millrace.simulate.engines import SimReward, SimRolloutEngine, SimTrainEngine, SimWeightSync
from millrace.types import Completion, Prompt, SamplingParams, Score, Segment, Tokens, tokens_of
from millrace.waits.registry import current

COST = CostModel(token_s=0.01, train_token_s=5e-5, step_s=0.1, transfer_s=0.05, pause_s=0.02)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One simulated run: the numbers that a configuration would have, and the costs."""

    mode: str = "async_partial"
    window: int = 16
    trigger: int = 1
    staleness: float = 2.0
    lookahead: int = 0
    """0 is one window, as in a configuration with staleness."""
    overlap_sync: bool = False
    on_sync: str = ""
    n: int = 8
    trainers: int = 1
    rollouts: int = 1
    slots: int = 64
    """Decode slots of each replica."""
    workers: int = 0
    """Reward workers. 0 scores everything at once."""
    test_freq: int = 0
    validation_s: float = 0.0
    save_freq: int = 0
    save_s: float = 0.0
    async_save: bool = True
    median: float = 250.0
    sigma: float = 0.8
    limit: int = 1024
    cost: CostModel = COST
    queue: float = 0.0
    """Share of their time that engines lose while requests wait for a slot."""
    chance: Callable[[Prompt], float] | None = None
    versions: int = 24

    @property
    def schedule(self) -> Schedule:
        fixed = MODES[self.mode]
        stale = fixed.staleness_threshold
        staleness = self.staleness if stale is None else stale
        window = self.window * self.trigger
        return Schedule(
            ppo_mini_batch_size=self.window,
            trigger_parameter_sync_step=self.trigger,
            staleness_threshold=staleness,
            on_sync=fixed.on_sync,
            placement=fixed.placement,
            overlap_sync=self.overlap_sync,
            lookahead=self.lookahead or (window if staleness > 0 else 1),
        )

    @property
    def setup(self) -> Setup:
        return Setup(
            schedule=self.schedule,
            n=self.n,
            trainers=self.trainers,
            rollouts=self.rollouts,
            replicas=self.rollouts,
            slots=self.slots * self.rollouts,
            reward_workers=self.workers,
            test_freq=self.test_freq,
            save_freq=self.save_freq,
            async_save=self.async_save,
        )

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


class LossyPace(DecodeSpeed):
    """Steps of an engine that loses the share `queue` of its time while requests wait."""

    queue = 0.0
    waits = False

    def _seconds(self) -> float:
        return super()._seconds() / (1 - self.queue * self.waits)

    def look(self, waits: bool) -> None:
        """Change the speed from now on."""
        self._move()
        self.waits = waits
        self._arm()


class LossyEngine(SimRolloutEngine):
    """An engine whose steps take longer while requests wait for a slot."""

    def __init__(self, cost: CostModel, *, slots: int, queue: float) -> None:
        super().__init__(cost, slots=slots)
        self._lossy = self._pace = LossyPace(cost.token_s, cost.request_s)
        self._lossy.queue = queue

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        self._lossy.look(self._running >= self._slots)
        try:
            return await super().generate(tokens, params, session)
        finally:
            self._lossy.look(self._running > self._slots)


class Workers:
    """A reward that `workers` processes compute, one call each."""

    def __init__(self, reward: SimReward, workers: int) -> None:
        self._reward = reward
        self._free = asyncio.Semaphore(workers)

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

    case: Case
    rows: list[dict[str, float]] = field(default_factory=list)
    validation: asyncio.Task[None] | None = None

    def published(self, *_: Any) -> None: ...

    def row(self, version: int, row: dict[str, float]) -> None:
        self.rows.append(row)

    def checkpoint_due(self, version: int) -> bool:
        return self.case.save_freq > 0 and version % self.case.save_freq == 0

    async def checkpoint(self, *_: Any, **__: Any) -> None:
        await asyncio.sleep(self.case.save_s)

    async def validated(self) -> None:
        if self.validation is not None:
            await self.validation
            self.validation = None

    def validate(self, version: int) -> None:
        if self.case.test_freq and version % self.case.test_freq == 0:
            self.validation = asyncio.ensure_future(asyncio.sleep(self.case.validation_s))


async def simulated_run(case: Case, folder: Path) -> list[dict[str, float]]:
    schedule, cost = case.schedule, case.cost
    loop = asyncio.get_running_loop()
    ledger = Ledger(schedule, case.versions * schedule.window)
    devices = Devices(case.trainers, {f"rollout-{i}": 1 for i in range(case.rollouts)})
    options = ReportConfig(trace=False, samples=0.0)
    recorder = EventRecorder(
        folder, 1, ledger, {}, devices, options, loop.time, lambda note: None, lambda tokens: ""
    )
    queue = SampleQueue(ledger, deadline_s=1e8)
    engines = [
        LossyEngine(cost, slots=case.slots, queue=case.queue)
        if case.queue
        else SimRolloutEngine(cost, slots=case.slots)
        for _ in range(case.rollouts)
    ]
    reward = SimReward(cost, case.chance) if case.chance else SimReward(cost)
    scorer = Workers(reward, case.workers) if case.workers else reward
    roller = SampleRoller(
        SingleTurn(),
        RetryingReward(scorer, 0),
        lambda tokens: str(tokens[:9]),
        SamplingParams(max_tokens=case.limit),
        case.n,
        seed=0,
        lengths=DrawnLengths(case.median, case.sigma, case.limit),
    )
    sampling = (
        DynamicSampling("score", max_num_gen_batches=0, window=schedule.window)
        if case.chance
        else None
    )
    rollouter = Rollouter(queue, Prompts(), RolloutPool(engines), roller, dynamic_sampling=sampling)
    train = SimTrainEngine(replace(cost, share=case.trainers))
    sync = SimWeightSync(cost, engines)
    kept = Kept(case)
    turns = turns_of(schedule.colocated, rollouter.pool, train)
    trainer = Trainer(queue, rollouter, train, turns, sync, kept)
    with current().registry.watched_by(*recorder.watchers):
        await trainer.begin()
        await run_pipeline(rollouter, trainer)
    return kept.rows


@functools.cache
def run(case: Case) -> Measured:
    """Simulate a run and return its figures, over the versions that `bench modes` counts."""
    with tempfile.TemporaryDirectory() as folder:
        rows = clock.run(simulated_run(case, Path(folder)))
        lines = RunReader(Path(folder)).read().accounts
    versions = counted(case.versions * case.schedule.window, 1, case.schedule)
    measured = measured_of(case.setup, dict(enumerate(rows, 1)), lines, versions)
    assert measured is not None
    return measured


def rate(case: Case) -> float:
    return run(case).rate
