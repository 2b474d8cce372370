"""Whole runs on the virtual clock, with the figures that advice reads."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millrace.bench.modes import counted
from millrace.environments.single_turn import SingleTurn
from millrace.observe.stopwatch import Stopwatch
from millrace.observe.watch import Event, Watch
from millrace.observe.watched import WatchedReplica, WatchedReward
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.turns import turns_of
from millrace.report.measure import measured_of
from millrace.report.measured import Measured, Setup
from millrace.rollout.dynamic_sampling import DynamicSampling
from millrace.rollout.lengths import DrawnLengths
from millrace.rollout.pool import RolloutPool
from millrace.rollout.sample import SampleRoller
from millrace.schedule.ledger import Ledger
from millrace.schedule.modes import MODES
from millrace.schedule.schedule import Schedule
from millrace.simulate import clock
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimReward, SimRolloutEngine, SimTrainEngine, SimWeightSync
from millrace.types import Prompt, SamplingParams, Score, tokens_of


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
    cost: CostModel = CostModel(
        token_s=0.01, train_token_s=0.00005, step_s=0.1, transfer_s=0.05, pause_s=0.02
    )
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
            mode=self.mode,
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


class Accounts:
    """A watcher that keeps the totals of accounts.jsonl that advice reads, by version."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self._state: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._held: defaultdict[str, float] = defaultdict(float)
        self._time = 0.0
        self._open = {"request": 0, "score": 0}
        """Number of open spans."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tokens: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        self._until(event.time)
        if event.track == "samples":
            self._moved(event)
        elif event.phase in ("begin", "end") and event.name in self._open:
            self._open[event.name] += 1 if event.phase == "begin" else -1
        elif event.name == "stepped":
            self._tokens["trained"] += sum(
                t.num_tokens for s in event.facts["samples"] for t in s.trajectories
            )

    def _until(self, now: float) -> None:
        for state, count in self._counts.items():
            self._held[state] += count * (now - self._time)
        for name, count in self._open.items():
            self._seconds[name] += count * (now - self._time)
        self._time = now

    def _moved(self, event: Event) -> None:
        if "sample" in event.facts:
            tokens = sum(t.num_tokens for t in event.facts["sample"].trajectories)
            self._tokens[f"dropped/{event.name}"] += tokens
            return
        old = self._state.pop(event.key, None)
        if old:
            self._counts[old] -= 1
        if event.name not in ("retired", "dropped"):
            self._state[event.key] = event.name
            self._counts[event.name] += 1

    def line(self, version: int, now: float) -> None:
        self._until(now)
        self.lines.append(
            {
                "version": version,
                "seconds": now,
                "slots": dict(self._held),
                "requests": {"seconds": self._seconds["request"]},
                "scores": {"seconds": self._seconds["score"]},
                "tokens": dict(self._tokens),
            }
        )


class Workers:
    """A reward that `workers` processes compute, one call each."""

    def __init__(self, reward: SimReward, workers: int) -> None:
        self._reward = reward
        self._free = asyncio.Semaphore(workers)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Score]:
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
    accounts: Accounts
    rows: list[dict[str, float]] = field(default_factory=list)
    validation: asyncio.Task[None] | None = None

    def published(self, *_: Any) -> None: ...

    def stepped(self, *_: Any) -> None: ...

    def row(self, version: int, row: dict[str, float]) -> None:
        self.rows.append({"version": version, **row})
        self.accounts.line(version, asyncio.get_running_loop().time())

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


async def _run(case: Case) -> Kept:
    schedule, cost = case.schedule, case.cost
    accounts = Accounts()
    loop = asyncio.get_running_loop()
    watch = Watch(loop.time, [accounts])
    ledger = Ledger(schedule, case.versions * schedule.window)
    queue = SampleQueue(ledger, deadline_s=1e8, watch=watch)
    devices = case.rollouts
    engines = [SimRolloutEngine(cost, slots=case.slots) for _ in range(devices)]
    replicas = [WatchedReplica(e, f"rollout-{i}", watch) for i, e in enumerate(engines)]
    reward = SimReward(cost, case.chance) if case.chance else SimReward(cost)
    scorer = Workers(reward, case.workers) if case.workers else reward
    roller = SampleRoller(
        lambda _: SingleTurn(),
        WatchedReward(scorer, watch),
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
    rollouter = Rollouter(
        queue, Prompts(), RolloutPool(replicas), roller, dynamic_sampling=sampling
    )
    train = SimTrainEngine(replace(cost, share=case.trainers))
    sync = SimWeightSync(cost, engines)
    kept = Kept(case, accounts)
    turns = turns_of(schedule.colocated, rollouter.pool, train)
    trainer = Trainer(queue, rollouter, train, turns, sync, kept, Stopwatch(loop.time))
    await trainer.begin()
    accounts.line(0, loop.time())
    await run_pipeline(rollouter, trainer)
    return kept


def run(case: Case) -> Measured:
    """Simulate a run and return its figures, over the versions that `bench modes` counts."""
    kept = clock.run(_run(case))
    schedule = case.schedule
    versions = counted(case.versions * schedule.window, 1, schedule)
    rows = [kept.rows[k] for k in versions]
    lines = {line["version"]: line for line in kept.accounts.lines}
    first, last = lines[versions[0]], lines[versions[-1] + 1]
    return measured_of(case.setup, rows, first, last)


def rate(case: Case) -> float:
    return run(case).rate
