"""The accounts add up in every mode, with drops, interruptions, stops, kills and resumes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.simulated import RUNS, mixed, schedule_of
from tests.report.accounts_cases import Accounts, check_a_stop_and_a_kill, run


@pytest.mark.parametrize("mode", RUNS)
@pytest.mark.parametrize("greedy", [False, True])
def test_every_token_of_a_whole_run_is_trained_or_a_baseline(mode: str, greedy: bool) -> None:
    accounts = Accounts(replicas=2)
    outcome = run(schedule_of(mode), 40, accounts, greedy=greedy)
    trained = sum(t.num_tokens for _, s in outcome.trained for t in s.trajectories)
    baseline = sum(s.greedy.num_tokens for _, s in outcome.trained if s.greedy)
    expected = {"trained": trained, "baseline": baseline}
    assert accounts.tokens.totals() == {name: n for name, n in expected.items() if n}


@pytest.mark.parametrize("mode", RUNS)
def test_dropped_tokens_are_counted_by_reason(mode: str) -> None:
    accounts = Accounts()
    outcome = run(schedule_of(mode), 40, accounts, chance=mixed)
    totals = accounts.tokens.totals()
    trained = sum(t.num_tokens for _, s in outcome.trained for t in s.trajectories)
    assert outcome.ledger.dropped["equal_outcomes"] > 0
    assert totals["trained"] == trained and totals["dropped/equal_outcomes"] > 0


@settings(max_examples=25, deadline=None)
@given(
    mode=st.sampled_from(RUNS),
    stop_at=st.floats(0.5, 60.0),
    cut=st.integers(0, 8),
    staleness=st.sampled_from([0.5, 1.0, 2.7]),
    drops=st.booleans(),
)
def test_the_accounts_add_up_over_a_stop_and_a_kill(
    mode: str, stop_at: float, cut: int, staleness: float, drops: bool
) -> None:
    schedule = schedule_of(mode, staleness=staleness)
    chance = mixed if drops else None
    check_a_stop_and_a_kill(schedule, 60, stop_at, lambda cuts: cut % cuts, chance=chance)
