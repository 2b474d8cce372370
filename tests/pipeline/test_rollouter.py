"""The Rollouter when rewards fail.

Dropped samples are counted and replaced. Too many drops end the run, and no sibling of a dropped
sample is left behind.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import RewardError
from millrace.pipeline import rollouter
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.run import run_pipeline
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.trainer import Trainer
from millrace.pipeline.turns import turns_of
from millrace.replicas.pool import RolloutPool
from millrace.replicas.roster import Roster
from millrace.rollout.episode import SingleTurn
from millrace.rollout.sample import SampleRoller
from millrace.schedule.ledger import Ledger
from millrace.schedule.modes import MODES
from millrace.simulate import clock
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimRolloutEngine, SimTrainEngine, SimWeightSync
from millrace.types import Completion, Prompt, SamplingParams, Score, tokens_of
from tests.pipeline.simulated import LongTail, Record, schedule_of
from tests.sweeps import sweep

COST = CostModel()
N = 4


@dataclass
class Reward:
    """A reward that fails if `fails(index, call)`. `call` counts the calls for that sample."""

    fails: Callable[[int, int], bool]
    calls: dict[int, int] = field(default_factory=dict)

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        call = self.calls.get(prompt.index, 0)
        self.calls[prompt.index] = call + 1
        await asyncio.sleep(0.1)
        if self.fails(prompt.index, call):
            raise RewardError(
                "timeout" if prompt.index % 2 else "exception",
                f"ValueError: bad answer to {prompt.index}",
            )
        return [Score(1.0)]

    async def close(self) -> None: ...


@dataclass
class Run:
    ledger: Ledger
    record: Record
    engine: SimTrainEngine
    rollout: SimRolloutEngine
    rollouter: Rollouter


async def train(
    mode: str, samples: int, reward: Reward, max_error_share: float = 1.0, window: int = 0
) -> Run:
    ledger = Ledger(schedule_of(mode), samples)
    queue, rollout, engine, record = (
        SampleQueue(ledger, deadline_s=1e5),
        SimRolloutEngine(COST),
        SimTrainEngine(COST),
        Record(ledger),
    )
    roller = SampleRoller(
        SingleTurn(),
        reward,
        lambda tokens: "",
        SamplingParams(max_tokens=1000),
        1 if window else N,
        seed=0,
        window=window,
    )
    rollouter = Rollouter(
        queue, LongTail(), RolloutPool([rollout]), roller, max_error_share=max_error_share
    )
    trainer = Trainer(
        queue,
        rollouter,
        engine,
        turns_of(ledger.schedule.colocated, rollouter.pool, engine),
        SimWeightSync(COST, [rollout]),
        record,
    )
    await trainer.begin()
    assert await run_pipeline(rollouter, trainer)
    return Run(ledger, record, engine, rollout, rollouter)


@pytest.mark.parametrize("mode", MODES)
def test_samples_whose_reward_fails_are_counted_by_reason_and_replaced(mode: str) -> None:
    """Indices 3, 6, 9, ... have no score. Forty other samples are trained, once each."""
    reward = Reward(lambda index, call: index % 3 == 0 and index > 0)
    run = clock.run(train(mode, 40, reward))
    trained = sorted(s.prompt.index for _, batch in run.engine.trained for s in batch)
    assert len(trained) == 40 == len(set(trained)) and all(i % 3 or i == 0 for i in trained)
    admitted = set(range(run.ledger.admitted))
    dropped = {i for i in admitted if i % 3 == 0 and i > 0}
    assert admitted == set(trained) | dropped
    assert run.ledger.dropped == {
        "timeout": sum(i % 2 for i in dropped),
        "exception": sum(i % 2 == 0 for i in dropped),
    }
    assert sorted(run.record.retired) == trained and run.ledger.occupied == 0


@pytest.mark.parametrize("failing", [0, N - 1])
def test_siblings_settle_before_their_sample_is_dropped(failing: int) -> None:
    """The first or the last of four trajectories fails.

    All four are drawn and scored, and none keeps a slot afterwards.
    """
    reward = Reward(lambda index, call: index == 2 and call == failing)
    run = clock.run(train("async_staleness", 16, reward))
    assert set(reward.calls.values()) == {N} and reward.calls[2] == N
    assert run.ledger.dropped == {"exception": 1} and run.ledger.admitted == 17
    assert (
        run.rollout._in_use == 0 and run.rollouter.requests == 0 and run.rollouter.unfinished == 0
    )
    assert not run.rollouter.pool._homes and not any(run.rollouter.pool._loads.values())


def leaf(error: BaseException) -> BaseException:
    return leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def test_a_function_that_always_fails_ends_the_run_with_its_own_words() -> None:
    """Eleven errors exceed a fifth of the last fifty, so the run ends before fifty samples."""
    reward = Reward(lambda index, call: True)
    with pytest.raises(BaseExceptionGroup) as caught:
        clock.run(train("async_partial", 64, reward, max_error_share=0.2))
    cause = leaf(caught.value)
    assert isinstance(cause, RewardError)
    assert (
        "11 of the last 11 samples had no score, more than reward.max_error_share = 0.2 of 50"
        in str(cause)
    )
    assert "ValueError: bad answer to" in str(cause)


def test_windows_that_need_no_reward_hide_no_error_of_a_reward() -> None:
    """Each response has many windows, and its reward is asked at its end."""
    reward = Reward(lambda index, call: True)
    with pytest.raises(BaseExceptionGroup) as caught:
        clock.run(train("async_partial", 4000, reward, max_error_share=0.2, window=10))
    assert "11 of the last 11 samples had no score" in str(leaf(caught.value))


@pytest.mark.parametrize(("every", "survives"), [(6, True), (4, False)])
def test_a_run_survives_a_share_of_errors_under_its_limit_and_none_over_it(
    every: int, survives: bool
) -> None:
    """With a limit of a fifth, every sixth sample may fail for ever. Every fourth may not."""
    reward = Reward(lambda index, call: index % every == 0)
    if survives:
        run = clock.run(train("on_policy_pipeline", 200, reward, max_error_share=0.2))
        assert run.ledger.retired == 200 and run.ledger.dropped["exception"] > 30
    else:
        with pytest.raises(BaseExceptionGroup):
            clock.run(train("on_policy_pipeline", 200, reward, max_error_share=0.2))


def test_with_a_limit_of_zero_the_first_error_ends_the_run() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        clock.run(
            train("async_swap", 64, Reward(lambda index, call: index == 20), max_error_share=0.0)
        )
    assert "1 of the last" in str(leaf(caught.value))
    assert "The last error, of sample 20, prompt 20: " in str(leaf(caught.value))


def test_another_exception_than_a_reward_error_ends_the_run_at_once() -> None:
    class Broken(Reward):
        async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
            raise LookupError("a bug")

    with pytest.raises(BaseExceptionGroup) as caught:
        clock.run(
            train("async_partial", 64, Broken(lambda index, call: False), max_error_share=1.0)
        )
    assert isinstance(leaf(caught.value), LookupError)


@pytest.mark.virtual_clock
async def test_a_request_stays_behind_a_gate_that_opens_and_closes_in_one_turn() -> None:
    """It would come after the interruption, and wait for the weights that wait for its return."""
    queue = SampleQueue(Ledger(schedule_of("async_partial"), 4), deadline_s=60.0)
    roster = Roster(1, max_restarts=1)
    roster.lose(0, 0, "why")
    roster.restarted(0)  # It waits for weights.
    pool = RolloutPool([SimRolloutEngine(COST)], roster)
    reward, params = Reward(lambda index, call: False), SamplingParams(max_tokens=1)
    roller = SampleRoller(SingleTurn(), reward, lambda tokens: "", params, N, seed=0)
    one = Rollouter(queue, LongTail(), pool, roller)
    one._gate.clear()
    draw = asyncio.create_task(one.draw(tokens_of([1]), params, "0/0"))
    await asyncio.sleep(1)
    one._gate.set()
    await one._interrupt()
    await asyncio.sleep(1)
    assert asyncio.get_running_loop().time() < 3 and not one.requests
    draw.cancel()


def test_the_rollouter_reads_on_sync_and_placement_of_the_schedule_alone() -> None:
    tree = ast.parse(Path(rollouter.__file__).read_text())
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("schedule")
    }
    assert read == {"on_sync", "colocated"}


@pytest.mark.parametrize("n", sweep([1, 8, 100], lambda n: n < 100))
def test_replicas_draw_the_first_samples_while_the_next_ones_are_admitted(n: int) -> None:
    """A replica has requests before a third turn admits trajectories."""
    ledger = Ledger(schedule_of("async_staleness", mini=128), 2048)
    admitted: list[int] = []

    class Engine(SimRolloutEngine):
        async def generate(self, *request: Any) -> Any:
            admitted.append(ledger.admitted * n)
            return await super().generate(*request)

    async def begin() -> None:
        engine, how = Engine(COST), SamplingParams(max_tokens=1000)
        await engine.swap(0)
        roller = SampleRoller(SingleTurn(), Reward(lambda *_: False), str, how, n, seed=0)
        runs = Rollouter(
            SampleQueue(ledger, deadline_s=1e5), LongTail(), RolloutPool([engine]), roller
        )
        task = asyncio.ensure_future(runs.run())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    clock.run(begin())
    turn = max(n, rollouter._TOGETHER)
    assert admitted[0] <= 2 * turn and admitted == sorted(admitted)
    assert admitted[-1] == ledger.schedule.capacity * n > 2 * turn
