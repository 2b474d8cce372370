"""Dynamic sampling in every mode.

Equal groups are dropped and replaced, and nothing else about a run changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest

from millrace.errors import RewardError
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.sample_queue import SampleQueue
from millrace.replicas.pool import RolloutPool
from millrace.rollout.dynamic_sampling import DynamicSampling, DynamicSamplingError
from millrace.rollout.episode import SingleTurn
from millrace.rollout.sample import SampleRoller
from millrace.schedule.ledger import Ledger, State
from millrace.schedule.modes import MODES
from millrace.schedule.schedule import Placement, Schedule
from millrace.simulate import clock
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimReward, SimRolloutEngine
from millrace.types import Completion, Prompt, SamplingParams, Score, Tokens
from tests.pipeline.simulated import LongTail, Outcome, mixed, schedule_of, simulate

COST = CostModel(reward_s=0.3)
TRAINED = 40


def indices(outcome: Outcome) -> list[int]:
    return sorted(s.prompt.index for _, s in outcome.trained)


def groups(outcome: Outcome) -> Iterator[set[float]]:
    for _, sample in outcome.trained:
        yield {t.score.value for t in sample.trajectories if t.score is not None}


@pytest.fixture(scope="module")
def kept() -> list[int]:
    """Return the first prompts whose groups differ. Texts and scores depend on no mode."""
    outcome = simulate(schedule_of("colocate_sync"), 3 * TRAINED, cost=COST, chance=mixed)
    return indices(outcome)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_the_first_samples_that_differ_and_accounts_for_the_rest(
    mode: str, kept: list[int]
) -> None:
    schedule = schedule_of(mode)
    outcome = simulate(schedule, TRAINED, cost=COST, chance=mixed)
    ledger = outcome.ledger
    assert indices(outcome) == kept[:TRAINED] and sorted(outcome.record.retired) == kept[:TRAINED]
    assert all(values == {0.0, 1.0} for values in groups(outcome))
    assert ledger.done() and ledger.occupied == 0 and ledger.version == schedule.versions(TRAINED)
    assert ledger.dropped == {"equal_outcomes": kept[TRAINED - 1] + 1 - TRAINED}
    assert ledger.dropped["equal_outcomes"] > 10, "the test needs something to drop"
    assert max(version - s.admitted_version for version, s in outcome.trained) <= schedule.lag_bound


def test_rows_count_every_drop_once() -> None:
    outcome = simulate(schedule_of("async_partial"), TRAINED, cost=COST, chance=mixed)
    counted = sum(row["filter_groups/dropped"] for row in outcome.record.rows)
    assert counted == outcome.ledger.dropped["equal_outcomes"]


@pytest.mark.parametrize("lookahead", [1, 3, 8])
@pytest.mark.parametrize(
    "mode", ["async_staleness", "async_partial", "async_swap", "colocate_partial"]
)
def test_a_look_ahead_and_drops_together_starve_no_sample(
    mode: str, lookahead: int, kept: list[int]
) -> None:
    schedule = schedule_of(mode, staleness=1.3, lookahead=lookahead)
    outcome = simulate(schedule, TRAINED, cost=COST, chance=mixed, replicas=2)
    assert indices(outcome) == kept[:TRAINED]
    assert max(version - s.admitted_version for version, s in outcome.trained) <= schedule.lag_bound


def test_colocated_placement_with_staleness_waits_for_a_full_window_of_kept_samples(
    kept: list[int],
) -> None:
    schedule = Schedule(
        ppo_mini_batch_size=4,
        trigger_parameter_sync_step=2,
        staleness_threshold=0.6,
        placement=Placement.COLOCATED,
    )
    outcome = simulate(schedule, TRAINED, cost=COST, chance=mixed)
    assert indices(outcome) == kept[:TRAINED] and outcome.ledger.version == schedule.versions(
        TRAINED
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stop_at", [0.5, 4.9, 9.7])
def test_a_stopped_run_goes_on_and_accounts_for_every_sample_once(
    mode: str, stop_at: float, kept: list[int]
) -> None:
    schedule = schedule_of(mode)
    first = simulate(schedule, TRAINED, cost=COST, chance=mixed, stop_at=stop_at)
    assert first.record.saved is not None, "the run should have been stopped"
    second = simulate(schedule, TRAINED, cost=COST, chance=mixed, start=first.record.saved)
    assert sorted(indices(first) + indices(second)) == kept[:TRAINED]
    assert (
        second.ledger.dropped == {"equal_outcomes": kept[TRAINED - 1] + 1 - TRAINED}
        and second.ledger.done()
    )


def leaf(error: BaseException) -> BaseException:
    return leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


@pytest.mark.parametrize("mode", MODES)
def test_problems_that_are_all_solved_end_the_run_at_the_cap_and_not_before(mode: str) -> None:
    """The cap is two windows of 8 or 4 samples. One more drop ends the run."""
    window = schedule_of(mode).window
    with pytest.raises(BaseExceptionGroup) as caught:
        simulate(schedule_of(mode), TRAINED, cost=COST, chance=lambda prompt: 1.0, most=2)
    cause = leaf(caught.value)
    assert isinstance(cause, DynamicSamplingError)
    dropped = 2 * window + 1
    assert f"{dropped} of the {dropped} samples (100%) finished while version 0 was live" in str(
        cause
    )
    assert (
        f"algorithm.filter_groups.max_num_gen_batches = 2 windows of {window}. Their mean score is 1."
        in str(cause)
    )


class Unlucky(SimReward):
    """A reward that fails for the prompts from 100 to 104."""

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        if 100 <= prompt.index < 105:
            raise RewardError("timeout", "slow")
        return await super().score(prompt, completions)


def bench(chance: Callable[[Prompt], float], metric: str = "score") -> Rollouter:
    """Return a rollouter on its own.

    Its ledger has slots for eight samples, each with a greedy response.
    """
    engine = SimRolloutEngine(COST, version=0)

    def text(tokens: Tokens) -> str:
        return str(tokens[:9])

    roller = SampleRoller(
        SingleTurn(),
        Unlucky(COST, chance),
        text,
        SamplingParams(1000),
        4,
        seed=0,
        greedy_baseline=True,
    )
    queue = SampleQueue(Ledger(Schedule(ppo_mini_batch_size=8)), deadline_s=1e5)
    sampling = DynamicSampling(metric, max_num_gen_batches=0, window=8)
    return Rollouter(
        queue,
        LongTail(),
        RolloutPool([engine]),
        roller,
        max_error_share=0.2,
        dynamic_sampling=sampling,
    )


async def run_for(rollouter: Rollouter, seconds: float) -> None:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(rollouter.run())
        await asyncio.sleep(seconds)
        task.cancel()


def test_a_drop_frees_its_slot_for_another_prompt_at_once_and_leaves_nothing_behind() -> None:
    rollouter = bench(lambda prompt: 0.0)
    clock.run(run_for(rollouter, 200.0))
    ledger = rollouter.queue.ledger
    assert (
        ledger.dropped["equal_outcomes"] > 150 and ledger.count(State.WAITING, State.RUNNING) == 8
    )
    under_way = {str(ledger._slots[i].prompt.index) for i in ledger.ids(State.RUNNING)}
    assert {session.split("/")[0] for session in rollouter.pool._homes} <= under_way
    assert rollouter.row(0)["filter_groups/mean_outcome"] == 0.0


def test_dropped_samples_were_scored_and_are_no_reward_errors() -> None:
    """Five errors occur among hundreds of drops.

    A fifth of the last fifty samples may fail, and a tenth does.
    """
    rollouter = bench(lambda prompt: 0.0)
    clock.run(run_for(rollouter, 200.0))
    assert (
        rollouter.queue.ledger.dropped["timeout"] == 5
        and rollouter.queue.ledger.dropped["equal_outcomes"] > 150
    )


@pytest.mark.virtual_clock
async def test_nothing_is_admitted_for_a_drop_while_rollouts_are_pause_for_sync() -> None:
    """Drain waits for the last tokens, not for scores.

    A sample that is dropped meanwhile gets its successor only afterwards.
    """
    rollouter = bench(lambda prompt: 0.0)
    ledger = rollouter.queue.ledger
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(rollouter.run())
        await asyncio.sleep(0.1)
        async with rollouter.pause_for_sync():
            before = ledger.admitted
            assert rollouter.unfinished == 0 and ledger.occupied
            await asyncio.sleep(1.0)  # the scores come
            assert ledger.occupied == 0 and ledger.admitted == before
        await asyncio.sleep(0.01)
        assert ledger.occupied == 8 and ledger.admitted == before + 8
        task.cancel()
