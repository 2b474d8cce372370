"""Advice for engines that lose time: while requests wait, or because they read tokens again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.report.advice.advise import advise
from millrace.report.advice.throughput import Throughput
from millrace.simulate.cost import CostModel
from tests.report.simulated import Case, run
from tests.report.test_advice import GROWING, MEASURED, SITUATIONS, followed

pytestmark = pytest.mark.xdist_group("advice")  # its simulated cases are kept in one worker

LOSSY = Case(
    window=8,
    slots=96,
    median=60.0,
    limit=256,
    versions=20,
    cost=CostModel(
        token_s=0.005,
        request_s=1e-5,
        train_token_s=2e-5,
        step_s=0.02,
        transfer_s=0.05,
        pause_s=0.01,
    ),
    queue=0.6,
)
"""Engines that lose more than half of their time while requests wait, so full ones are slower."""


def test_engines_that_lose_time_while_requests_wait_are_not_filled() -> None:
    """The best staleness is where few requests wait, and a larger one is slower."""
    before = run(LOSSY.but(staleness=1.0))
    assert before.step_cost and before.step_cost.queue == pytest.approx(0.6, abs=0.1)
    first = advise(before)[0]
    assert "has the best rate" in first.text and first.at_most and first.gain is not None
    best = run(followed(LOSSY, first)).rate
    assert 1.3 * before.rate < best <= (1 + first.gain) * before.rate
    full = run(LOSSY.but(staleness=4.0)).rate
    assert best > 1.1 * full
    about = advise(run(LOSSY.but(staleness=2.6)))
    (nothing_more,) = [one for one in about if "would gain nothing" in one.text]
    assert nothing_more.gain is None and not nothing_more.overrides


def test_checkpoints_of_engines_that_lose_time_still_are_advice() -> None:
    """In turns, engines may give more samples than those that are full all the time."""
    cost = replace(LOSSY.cost, switch_s=0.05)
    case = LOSSY.but(mode="colocate_sync", slots=48, cost=cost, save_freq=1, save_s=1.0)
    before = run(case)
    first = advise(before)[0]
    assert first.key == "trainer.save_freq" and first.gain is not None
    after = run(followed(case, first))
    assert after.rate == pytest.approx((1 + first.gain) * before.rate, rel=0.05)


def test_a_gain_is_a_bound_where_syncs_make_engines_read_much_again() -> None:
    """Fuller engines read more tokens again, and no figure shows how long that takes."""
    few = SITUATIONS["ledger full, slow rewards"].case
    for case, bound in ((MEASURED, True), (MEASURED.but(mode="async_swap"), False), (few, False)):
        measured = run(case)
        first = advise(measured)[0]
        assert first.key == "async_training.staleness_threshold" and first.gain is not None
        assert first.at_most is bound is Throughput(measured).rereads


def test_contexts_that_no_sync_interrupted_are_not_read_again() -> None:
    """Siblings find their prompt in a cache. Each turn of an agent reads what came before it."""
    measured = run(MEASURED)
    # 8 responses of 300 tokens to a prompt of 1,000. A tenth of the groups is interrupted half way.
    # Of 1,220 read tokens, 220 were read again.
    groups = measured.drawn_tokens / 2400
    cached = replace(
        measured,
        read_tokens=1220 * groups,
        reused_tokens=7700 * groups,
        prompt_tokens=8000 * groups,
    )
    assert 0 < cached.read_again <= 220 / 2400
    whole = replace(cached, read_tokens=8000 * groups, reused_tokens=0.0)
    assert whole.read_again == 0
    assert replace(measured, agents=True).read_again == 0 < measured.read_again
    assert not any("mode=async_swap" in str(one) for one in advise(replace(measured, agents=True)))


@pytest.mark.parametrize("mode", ["colocate_sync", "colocate_partial"])
def test_a_larger_window_is_a_bound_where_windows_overlap_already(mode: str) -> None:
    cost = replace(GROWING, train_token_s=2.5e-4, transfer_s=0.3, switch_s=0.3)
    case = Case(mode=mode, slots=256, window=8, trainers=2, rollouts=2, cost=cost)
    key = "async_training.trigger_parameter_sync_step"
    (about,) = [one for one in advise(run(case)) if one.key == key]
    assert about.at_most is (mode == "colocate_partial")


@pytest.mark.parametrize(
    ("case", "train_token_s"),
    [
        (Case(mode="async_partial", slots=128, staleness=0.3, window=8, versions=16), 5e-4),
        (Case(mode="async_partial", slots=128, staleness=0.3, window=16, versions=16), 5e-4),
        (
            Case(mode="colocate_sync", slots=128, window=8, versions=24, trainers=2, rollouts=2),
            2.5e-4,
        ),
    ],
)
def test_the_next_step_has_slots_while_a_window_trains(case: Case, train_token_s: float) -> None:
    """With fewer, both sides take turns, and the promise would be far too large."""
    cost = replace(GROWING, train_token_s=train_token_s, transfer_s=0.1, switch_s=0.3)
    case = case.but(cost=cost)
    before = run(case)
    key = "async_training.staleness_threshold="
    (about,) = [one for one in advise(before) if any(o.startswith(key) for o in one.overrides)]
    after = run(followed(case, about))
    schedule = after.setup.schedule
    assert schedule.capacity >= schedule.window + schedule.step_size
    assert about.gain == pytest.approx(after.rate / before.rate - 1, abs=0.05)
