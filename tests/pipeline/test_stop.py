"""A stop always saves: in every mode, at any moment, with any grace, also during a validation.

The loops, the Ledger, the stop request and the record are real. Engines, checkpoint files and time
are simulated.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millrace.observe.metrics import RunCounts
from millrace.observe.progress import Progress, State
from millrace.pipeline.record import RunRecord
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.turns import turns_of
from millrace.pipeline.validation import Validator
from millrace.replicas.pool import RolloutPool
from millrace.rollout.episode import SingleTurn
from millrace.rollout.sample import SampleRoller
from millrace.run.signals import StopRequest
from millrace.run.train import finish_run
from millrace.schedule.ledger import Ledger, LedgerSnapshot, Totals
from millrace.schedule.schedule import OnSync, Schedule
from millrace.simulate import clock
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimReward, SimRolloutEngine, SimTrainEngine, SimWeightSync
from millrace.types import Prompt, Sample, SamplingParams, Tokens, tokens_of
from tests.pipeline.simulated import RUNS, LongTail, schedule_of

SAMPLES = 40
COST = CostModel(reward_s=0.3, token_s=0.02, transfer_s=0.5)
SOON_S = 60.0
"""A stop takes at most its grace plus this time."""
VALIDATIONS = {"no validation": 0.0, "a short validation": 2.0, "a long validation": 3 * SOON_S}
"""Seconds that the validation of each version takes."""
GRACES = {"no grace": 0.0, "a short grace": 0.7, "a long grace": 1000.0}


@dataclass
class Saves:
    """Checkpoints that take a while and keep the newest snapshot."""

    saved: LedgerSnapshot | None = None

    async def begin(self, snapshot: LedgerSnapshot, engine: object, *, staged: bool) -> None:
        await asyncio.sleep(1.0)

    async def finish(self, snapshot: LedgerSnapshot, engine: object, counts: object) -> Path:
        await asyncio.sleep(0.4)
        self.saved = snapshot
        return Path(f"version-{snapshot.version}")


class NoHistory:
    def version(self, totals: Totals, trained: list[int]) -> None: ...
    def catch_up(self) -> None: ...


class NoView:
    def open(self) -> None: ...
    def close(self) -> None: ...
    def update(self, state: State, event: str) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass
class Run:
    ledger: Ledger
    engine: SimTrainEngine
    saves: Saves
    complete: bool
    seconds: float
    stopped_s: float | None
    trained: list[Sample] = field(default_factory=list)


def decode(tokens: Tokens) -> str:
    """Return a text for the first tokens. The longest validations draw 9,000 of them."""
    return str(tokens[:9])


async def _run(
    schedule: Schedule,
    *,
    start: LedgerSnapshot | None = None,
    stop_at: float | None = None,
    grace_s: float = 0.0,
    validation_s: float = 0.0,
    save_freq: int = 0,
) -> Run:
    loop = asyncio.get_running_loop()
    ledger = Ledger.restore(schedule, start, SAMPLES) if start else Ledger(schedule, SAMPLES)
    queue = SampleQueue(ledger, deadline_s=1e8)
    replicas = [SimRolloutEngine(COST, slots=24) for _ in range(2)]
    pool, engine, reward = RolloutPool(replicas), SimTrainEngine(COST), SimReward(COST)
    params = SamplingParams(max_tokens=1000)
    roller = SampleRoller(SingleTurn(), reward, decode, params, 4, seed=0)
    same = SamplingParams(1 + round(validation_s / COST.token_s), ignore_eos=True)
    problems = [Prompt(i, tokens_of([1]), "", "val", "") for i in range(8)]
    validator = Validator(problems, pool, reward, decode, same, 1, False, seed=0)
    rollouter = Rollouter(queue, LongTail(), pool, roller)
    saves, stop, told = Saves(), StopRequest(), list[float]()
    async with asyncio.TaskGroup() as tasks:
        made: dict[str, Any] = {"history": NoHistory(), "checkpoints": saves}
        record = RunRecord(
            **made,
            engine=engine,
            validator=validator,
            sinks=(),
            progress=Progress(NoView(), "test", "test"),
            save_freq=save_freq,
            async_save=True,
            test_freq=int(validation_s > 0),
            counts=RunCounts(),
            guard=None,
            deadline_s=1e8,
            tasks=tasks,
        )
        sync = SimWeightSync(COST, replicas)
        turns = turns_of(schedule.colocated, pool, engine)
        trainer = Trainer(queue, rollouter, engine, turns, sync, record)
        await trainer.begin()
        stop.attach(queue, grace_s, record.abandon_validation)
        if stop_at is not None:
            loop.call_at(stop_at, lambda: (stop.request(), told.append(loop.time())))  # type: ignore[func-returns-value]
        begin = loop.time()
        trained_all = await run_pipeline(rollouter, trainer)
        complete = await finish_run(trained_all, trainer, record, stop, save_last=False)
    since = loop.time() - told[0] if told else None
    trained = [s for _, batch in engine.trained for s in batch]
    return Run(ledger, engine, saves, complete, loop.time() - begin, since, trained)


def run(schedule: Schedule, **options: Any) -> Run:
    return clock.run(_run(schedule, **options))


def check_stopped(schedule: Schedule, found: Run, grace_s: float) -> None:
    """Check the facts that are true after every stop."""
    assert found.stopped_s is not None and not found.complete
    assert found.stopped_s < grace_s % 1000 + SOON_S, "a stop waits for no validation"
    saved = found.saves.saved
    assert saved is not None and saved.version == found.ledger.version, "a stop saves"
    found.ledger.check()
    assert Ledger.restore(schedule, saved, SAMPLES).snapshot() == saved
    if schedule.on_sync is OnSync.DRAIN:
        kept = [t for _, slot in saved.slots for t in slot.progress]
        kept += [t for _, slot in saved.slots if slot.sample for t in slot.sample.trajectories]
        mixed = [t.versions for t in kept if len(set(t.versions)) > 1]
        assert not mixed, "in drain mode a saved trajectory has one version"
    rest = run(schedule, start=saved)
    assert rest.complete and rest.ledger.done()
    done = [s.prompt.index for s in (*found.trained, *rest.trained)]
    assert sorted(done) == list(range(SAMPLES)), "every sample is trained once"


@pytest.mark.parametrize("validation", VALIDATIONS)
@pytest.mark.parametrize("grace", GRACES)
@pytest.mark.parametrize("mode", RUNS)
def test_a_stop_at_any_moment_saves_what_a_resumed_run_completes(
    mode: str, grace: str, validation: str
) -> None:
    dice = random.Random(f"{mode}/{grace}/{validation}")
    schedule = schedule_of(mode, staleness=dice.choice([0.5, 1.3, 2.0]))
    options = {"validation_s": VALIDATIONS[validation], "save_freq": dice.choice([0, 1, 2])}
    end = run(schedule, **options).seconds
    for _ in range(5):
        stop_at, grace_s = dice.uniform(0.0, end * 0.99), GRACES[grace]
        found = run(schedule, stop_at=stop_at, grace_s=grace_s, **options)
        check_stopped(schedule, found, grace_s)
