"""A whole run on the virtual clock: the real loops and Ledger, simulated engines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from millrace.observe.timing import TOTALS
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.turns import turns_of
from millrace.ports import Agent, Teacher
from millrace.replicas.pool import RolloutPool
from millrace.rollout.dynamic_sampling import DynamicSampling
from millrace.rollout.episode import SingleTurn
from millrace.rollout.retry import RetryingReward
from millrace.rollout.sample import SampleRoller
from millrace.schedule.ledger import Ledger, LedgerSnapshot, State, Totals
from millrace.schedule.modes import MODES
from millrace.schedule.schedule import Schedule
from millrace.simulate import clock
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimReward, SimRolloutEngine, SimTrainEngine, SimWeightSync
from millrace.types import Prompt, Sample, SamplingParams, tokens_of
from millrace.waits.registry import Event, Watcher, acting, current

RUNS = (
    *MODES,
    *(
        f"{mode}+overlap"
        for mode in ("one_step_off", "async_staleness", "async_partial", "async_swap")
    ),
)
"""Every mode, and the modes that allow overlap_sync with it."""


def schedule_of(
    mode: str, *, mini: int = 4, trigger: int = 2, staleness: float = 0.5, lookahead: int = 1
) -> Schedule:
    mode, _, overlap = mode.partition("+")
    fixed = MODES[mode]
    stale = fixed.staleness_threshold
    return Schedule(
        ppo_mini_batch_size=mini,
        trigger_parameter_sync_step=fixed.trigger_parameter_sync_step or trigger,
        staleness_threshold=staleness if stale is None else stale,
        on_sync=fixed.on_sync,
        placement=fixed.placement,
        overlap_sync=bool(overlap),
        lookahead=lookahead,
    )


class LongTail:
    """Prompts whose first token is the length of their responses.

    Lengths are log-normal and a pure function of the index.
    """

    def __getitem__(self, index: int) -> Prompt:
        length = min(800, int(20 + random.Random(index).lognormvariate(3.5, 1.0)))
        return Prompt(index, tokens_of([length]), str(index), "sim")


@dataclass
class Record:
    """An Observer that keeps the events of a run. It watches local steps."""

    names: ClassVar[frozenset[str]] = frozenset({"stepped"})
    ledger: Ledger
    rows: list[dict[str, float]] = field(default_factory=list)
    retired: list[int] = field(default_factory=list)
    cuts: list[LedgerSnapshot] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    saved: LedgerSnapshot | None = None
    saves: list[tuple[int, bool]] = field(default_factory=list)
    """Version, and whether this save is the last."""
    retired_before: int = 0
    save_s: float = 0.0
    """Seconds of each checkpoint. Every second version has one, unless this is 0."""
    validation_s: float = 0.0
    """Seconds of each validation. Every version has one, unless this is 0."""
    waited: list[float] = field(default_factory=list)
    """Seconds that the trainer waited for each validation."""
    ended: list[float] = field(default_factory=list)
    """The time at which each local step ended."""
    validation: asyncio.Task[None] | None = None
    saving: Callable[[LedgerSnapshot], None] = lambda snapshot: None
    """Sees each snapshot when it is saved."""

    def published(self, trained: list[int], totals: Totals) -> None:
        assert totals.retired == len(self.retired) + len(trained) + self.retired_before
        self.retired += trained
        if not self.ledger.count(State.TAKEN, State.TRAINED):
            self.cuts.append(self.ledger.snapshot())

    def __call__(self, event: Event) -> None:
        self.ended.append(event.time)

    def row(self, version: int, row: dict[str, float]) -> None:
        self.rows.append({"version": version, **row})

    def checkpoint_due(self, version: int) -> bool:
        return self.save_s > 0 and version % 2 == 0

    async def checkpoint(self, snapshot: LedgerSnapshot, *, last: bool = False) -> None:
        await asyncio.sleep(self.save_s)
        self.saving(snapshot)
        self.saved = snapshot
        self.saves.append((snapshot.version, last))

    async def validated(self) -> None:
        clock = asyncio.get_running_loop().time
        since = clock()
        if self.validation is not None:
            await self.validation
        self.waited.append(clock() - since)

    def validate(self, version: int) -> None:
        if self.validation_s:
            self.validation = asyncio.ensure_future(asyncio.sleep(self.validation_s))


SINGLE_TURN = SingleTurn()

TeachersOf = Callable[[Prompt], Mapping[str, Teacher]]
Watchers = Callable[[float, Ledger], Sequence[Watcher]]
"""Makes the watchers of a run from the time and its ledger."""


def mixed(prompt: Prompt) -> float:
    """Return the chance of a right response. Some groups are all right and some all wrong."""
    return (prompt.index * 7 % 11) / 10


def parts_of(row: dict[str, float]) -> dict[str, float]:
    """Return the seconds of the parts of the trainer's time in a row, without their totals."""
    timing = {k.removeprefix("timing_s/"): v for k, v in row.items() if k.startswith("timing_s/")}
    return {name: value for name, value in timing.items() if name not in TOTALS}


@dataclass
class Outcome:
    record: Record
    ledger: Ledger
    engine: SimTrainEngine
    seconds: float

    @property
    def trained(self) -> list[tuple[int, Sample]]:
        """Return (the trainer's version, sample) in order of training."""
        return [(version, s) for version, samples in self.engine.trained for s in samples]


async def _simulate(schedule: Schedule, samples: int, cost: CostModel, slots: int, n: int, start: LedgerSnapshot | None,
                    stop_at: float | None, replicas: int, chance: Callable[[Prompt], float] | None, most: int,
                    greedy: bool, save_s: float, validation_s: float, watchers: Watchers,
                    saving: Callable[[LedgerSnapshot], None], agent: Agent,
                    retries: int, teachers_of: TeachersOf) -> Outcome:  # fmt: skip
    loop = asyncio.get_running_loop()
    ledger = Ledger.restore(schedule, start, samples) if start else Ledger(schedule, samples)
    queue = SampleQueue(ledger, deadline_s=1e8)
    rollouts = [SimRolloutEngine(cost, slots=slots) for _ in range(replicas)]
    engine = SimTrainEngine(cost)
    record = Record(ledger, retired_before=ledger.retired, save_s=save_s, validation_s=validation_s)
    record.saving = saving
    params = SamplingParams(max_tokens=1000)
    reward = RetryingReward(SimReward(cost, chance) if chance else SimReward(cost), 0)
    roller = SampleRoller(
        agent,
        reward,
        lambda tokens: str(tokens[:9]),
        params,
        n,
        seed=0,
        greedy_baseline=greedy,
        retries=retries,
        teachers_of=teachers_of,
    )
    sampling = (
        DynamicSampling("score", max_num_gen_batches=most, window=schedule.window)
        if chance
        else None
    )
    pool = RolloutPool(rollouts)
    rollouter = Rollouter(queue, LongTail(), pool, roller, dynamic_sampling=sampling)
    turns = turns_of(schedule.colocated, rollouter.pool, engine)
    sync = SimWeightSync(cost, rollouts)
    trainer = Trainer(queue, rollouter, engine, turns, sync, record)
    if stop_at is not None:
        loop.call_at(stop_at, queue.stop, 1.0)
    begin = loop.time()
    with current().registry.watched_by(*watchers(begin, ledger), record):
        with acting("trainer"):
            await trainer.begin()
        await run_pipeline(rollouter, trainer)
        seconds = loop.time() - begin
        await pool.stats()
    return Outcome(record, ledger, engine, seconds)


def simulate(
    schedule: Schedule, samples: int, *, cost: CostModel | None = None, slots: int = 64, n: int = 4,
    start: LedgerSnapshot | None = None, stop_at: float | None = None, replicas: int = 1,
    chance: Callable[[Prompt], float] | None = None, most: int = 0, greedy: bool = False,
    save_s: float = 0.0, validation_s: float = 0.0, watchers: Watchers = lambda now, ledger: (),
    saving: Callable[[LedgerSnapshot], None] = lambda snapshot: None,
    agent: Agent = SINGLE_TURN, retries: int = 0,
    teachers_of: TeachersOf = lambda prompt: {},
) -> Outcome:  # fmt: skip
    """Simulate a whole run.

    `chance` gives the chance of a right response. With it, samples with equal outcomes are dropped,
    at most `most` windows of them per version.
    """
    return clock.run(
        _simulate(
            schedule,
            samples,
            cost or CostModel(),
            slots,
            n,
            start,
            stop_at,
            replicas,
            chance,
            most,
            greedy,
            save_s,
            validation_s,
            watchers,
            saving,
            agent,
            retries,
            teachers_of,
        )
    )
