"""The accounts add up in every mode, with drops, interruptions, stops, kills and resumes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.simulate.cost import CostModel
from tests.pipeline.simulated import RUNS, mixed, schedule_of
from tests.report.accounts_cases import Accounts, held, run

COST = CostModel(reward_s=0.3, log_prob_token_s=0.0001)


@pytest.mark.parametrize("mode", RUNS)
@pytest.mark.parametrize("greedy", [False, True])
def test_every_token_of_a_whole_run_is_trained_or_a_baseline(mode: str, greedy: bool) -> None:
    accounts = Accounts(replicas=2)
    outcome = run(schedule_of(mode), 40, accounts, cost=COST, greedy=greedy)
    trained = sum(t.num_tokens for _, s in outcome.trained for t in s.trajectories)
    baseline = sum(s.greedy.num_tokens for _, s in outcome.trained if s.greedy)
    expected = {"trained": trained, "baseline": baseline}
    assert accounts.tokens.totals() == {name: n for name, n in expected.items() if n}
    accounts.check_time()


@pytest.mark.parametrize("mode", RUNS)
def test_dropped_tokens_are_counted_by_reason(mode: str) -> None:
    accounts = Accounts()
    outcome = run(schedule_of(mode), 40, accounts, cost=COST, chance=mixed)
    totals = accounts.tokens.totals()
    trained = sum(t.num_tokens for _, s in outcome.trained for t in s.trajectories)
    assert outcome.ledger.dropped["equal_outcomes"] > 0
    assert totals["trained"] == trained and totals["dropped/equal_outcomes"] > 0
    accounts.check_time()


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
    """One attempt stops. A second one resumes, is killed after some version, and a third resumes."""
    schedule = schedule_of(mode, staleness=staleness)
    options = {"cost": COST, "chance": mixed if drops else None}
    first = Accounts()
    stopped = run(schedule, 60, first, stop_at=stop_at, **options)
    first.check_time()
    snapshot = stopped.record.saved or stopped.ledger.snapshot()
    first.tokens.end(snapshot)
    totals = first.tokens.totals()
    assert sum(totals.values()) == first.tokens.generated
    assert totals.get("held", 0) == held(snapshot)
    counts = first.tokens.counts(snapshot)

    second = Accounts(counts=counts, before=first.tokens.generated)
    resumed = run(schedule, 60, second, start=snapshot, **options)
    second.check_time()
    assert second.tokens.totals().get("lost", 0) == 0
    assert second.tokens.totals().get("held", 0) == 0
    trained = [s for o in (stopped, resumed) for _, s in o.trained]
    assert second.tokens.totals()["trained"] == sum(
        t.num_tokens for s in trained for t in s.trajectories
    )

    # The second attempt is killed at its end instead. The third one resumes from some version.
    if not second.cuts:
        return
    at, kept, _ = second.cuts[cut % len(second.cuts)]
    third = Accounts(counts=kept, before=second.tokens.generated)
    repeated = run(schedule, 60, third, start=at, **options)
    third.check_time()
    totals = third.tokens.totals()
    early = [s for o in (stopped, resumed) for _, s in o.trained][: at.retired]
    assert totals["trained"] == sum(
        t.num_tokens for s in [*early, *(s for _, s in repeated.trained)] for t in s.trajectories
    )
    survives = sum(int(n) for n in kept.values()) + held(at)
    assert totals.get("lost", 0) == second.tokens.generated - survives
