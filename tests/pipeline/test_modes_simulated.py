"""All eight modes run through one Rollouter and one Trainer, on the virtual clock."""

from __future__ import annotations

import functools

import pytest

from millrace.schedule.ledger import Ledger
from millrace.schedule.schedule import OnSync
from millrace.simulate.cost import CostModel
from millrace.waits.registry import Event, Watcher
from tests.pipeline.simulated import RUNS, Outcome, Record, schedule_of, simulate

pytestmark = pytest.mark.xdist_group("modes")  # one worker simulates each run of `forty` once

COST = CostModel(reward_s=0.3)


@functools.cache
def forty(mode: str, greedy: bool = False) -> Outcome:
    """Return a run of 40 samples that many tests look at."""
    return simulate(schedule_of(mode), 40, cost=COST, greedy=greedy)


def lags(outcome: Outcome) -> list[int]:
    return [version - sample.admitted_version for version, sample in outcome.trained]


@pytest.mark.parametrize("mode", RUNS)
def test_every_sample_is_trained_once_in_order_within_the_lag_bound(mode: str) -> None:
    schedule = schedule_of(mode)
    outcome = forty(mode)
    assert [s.prompt.index for _, s in outcome.trained] == list(range(40))
    assert sorted(outcome.record.retired) == list(range(40))
    assert max(lags(outcome)) <= schedule.lag_bound
    assert outcome.ledger.done() and outcome.ledger.version == schedule.versions(40)


@pytest.mark.parametrize("mode", RUNS)
def test_a_run_that_does_not_divide_trains_every_sample(mode: str) -> None:
    outcome = simulate(schedule_of(mode), 37, cost=COST)
    assert sorted(s.prompt.index for _, s in outcome.trained) == list(range(37))


def test_a_run_that_goes_on_in_drain_mode_draws_what_was_cut_short_again() -> None:
    """Trajectories that another mode left unfinished would span two versions."""
    first = simulate(schedule_of("async_partial"), 60, stop_at=12.0)
    start = first.record.saved
    assert start is not None and any(t for _, s in start.slots for t in s.progress)
    whole = [t.segments for _, s in start.slots for t in s.progress if t.finished]
    whole += [t.segments for _, s in start.slots if s.sample for t in s.sample.trajectories]
    rest = simulate(schedule_of("async_staleness"), 60, start=start)
    trained = [t for _, s in rest.trained for t in s.trajectories]
    assert all(len(set(t.versions)) == 1 or t.segments in whole for t in trained)


@pytest.mark.parametrize("mode", RUNS)
def test_trajectories_span_versions_only_where_they_may(mode: str) -> None:
    schedule = schedule_of(mode)
    outcome = simulate(schedule, 64, cost=COST)
    spans = [len(set(t.versions)) for _, s in outcome.trained for t in s.trajectories]
    assert all(
        list(t.versions) == sorted(t.versions) for _, s in outcome.trained for t in s.trajectories
    )
    if schedule.on_sync is OnSync.DRAIN:
        assert set(spans) == {1}
    else:
        assert max(spans) > 1, "a long tail must meet a sync"


def test_lengths_do_not_depend_on_the_mode() -> None:
    """Nothing is truncated. Every mode draws the same trajectories, despite interruptions."""
    drawn = {}
    for mode in RUNS:
        outcome = forty(mode)
        drawn[mode] = {
            s.prompt.index: [t.num_tokens for t in s.trajectories] for _, s in outcome.trained
        }
    assert all(lengths == drawn["colocate_sync"] for lengths in drawn.values())


def test_zero_staleness_is_strictly_on_policy() -> None:
    for mode in ("colocate_sync", "on_policy_pipeline", "stream_off_policy"):
        assert set(lags(forty(mode))) == {0}


def test_one_step_off_trains_batch_k_on_version_k_minus_2() -> None:
    outcome = forty("one_step_off")
    for k, (_, samples) in enumerate(outcome.engine.trained, start=1):
        assert {s.admitted_version for s in samples} == {max(0, k - 2)}
        assert {v for s in samples for t in s.trajectories for v in t.versions} == {max(0, k - 2)}


@pytest.mark.parametrize(
    "mode, saved",
    [("one_step_off", 0.5), ("async_staleness", 0.8), ("async_partial", 0.8), ("async_swap", 0.8)],
)
def test_with_overlap_the_trainer_waits_for_no_transfer(mode: str, saved: float) -> None:
    """Over slow links, overlap saves most seconds of the transfers.

    With only one window in flight, it saves half of them.
    """
    cost = CostModel(transfer_s=2.0, train_token_s=0.002)
    apart, beside = (
        simulate(schedule_of(m, staleness=2.0), 80, cost=cost) for m in (mode, f"{mode}+overlap")
    )
    assert sum(
        row.get("timing_s/sync_transfer", 0.0) for row in beside.record.rows
    ) == pytest.approx(2.0), "of the last version alone"
    assert sum(row["sync/transfer_s"] for row in beside.record.rows) == pytest.approx(
        2.0 * len(beside.record.rows)
    )
    assert beside.seconds < apart.seconds - saved * 2.0 * (len(apart.record.rows) - 1)
    assert [row["version"] for row in beside.record.rows] == [
        row["version"] for row in apart.record.rows
    ]


def test_what_is_trained_while_a_version_is_on_its_way_is_of_that_version() -> None:
    """The trainer's weights have that version.

    Ages count from the trainer's version, not from the version that rollouts serve.
    """
    outcome = simulate(
        schedule_of("async_swap+overlap", mini=4, trigger=1, staleness=2.0),
        64,
        cost=CostModel(transfer_s=5.0),
    )
    assert [version for version, _ in outcome.engine.trained] == list(range(16))
    assert (
        max(lags(outcome))
        == schedule_of("async_swap+overlap", mini=4, trigger=1, staleness=2.0).lag_bound
    )


@pytest.mark.parametrize(
    "mode", ["one_step_off", "one_step_off+overlap", "async_staleness+overlap"]
)
def test_where_rollouts_are_awaited_and_order_is_strict_no_speed_decides_what_is_trained(
    mode: str,
) -> None:
    """Deterministic runs rely on this."""
    costs = [
        COST,
        CostModel(transfer_s=7.0),
        CostModel(train_token_s=0.01),
        CostModel(token_s=0.2, pause_s=3.0),
    ]
    runs = [simulate(schedule_of(mode, staleness=1.7), 60, cost=cost).trained for cost in costs]
    seen = [
        [(version, s.prompt.index, [t.versions for t in s.trajectories]) for version, s in run]
        for run in runs
    ]
    assert all(one == seen[0] for one in seen)


@pytest.mark.parametrize("mode", ["colocate_sync", "async_partial", "async_partial+overlap"])
def test_a_checkpoint_that_nothing_trains_after_is_the_last(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Record, "checkpoint_due", lambda self, version: version % 2 == 0)
    assert simulate(schedule_of(mode), 48, cost=COST).record.saves == [
        (2, False),
        (4, False),
        (6, True),
    ]


@pytest.mark.parametrize("mode", RUNS)
def test_seconds_in_which_rollouts_are_held_still_are_told_where_they_are(mode: str) -> None:
    schedule, rows = schedule_of(mode), forty(mode).record.rows
    held = [row["sync/hold_s"] for row in rows if "sync/hold_s" in row]
    if schedule.colocated or schedule.on_sync is OnSync.SWAP:
        assert not held
    else:
        assert len(held) == len(rows) and all(seconds > COST.pause_s - 1e-9 for seconds in held)
        if schedule.on_sync is OnSync.DRAIN and schedule.lag_bound:  # some are in flight
            assert max(held) > COST.pause_s + COST.token_s


@pytest.mark.parametrize("mode", RUNS)
def test_any_cut_can_be_resumed(mode: str) -> None:
    schedule = schedule_of(mode, staleness=1.3)
    whole = simulate(schedule, 48, cost=COST, replicas=2)
    for cut in whole.record.cuts[:-1]:
        rest = simulate(schedule, 48, cost=COST, start=cut, replicas=2)
        done = set(whole.record.retired[: cut.retired])
        again = [s.prompt.index for _, s in rest.trained]
        assert (
            len(again) == len(set(again))
            and done | set(again) == set(range(48))
            and not done & set(again)
        )


@pytest.mark.parametrize("mode", RUNS)
def test_a_greedy_baseline_is_drawn_and_held_still_like_its_siblings(mode: str) -> None:
    """Every mode draws the same greedy responses. In drain mode, each has a single version."""
    schedule = schedule_of(mode)
    outcome = forty(mode, greedy=True)
    reference = forty("colocate_sync", greedy=True)
    greedy = {s.prompt.index: s.greedy for _, s in outcome.trained}
    assert sorted(greedy) == list(range(40)) and all(
        len(s.trajectories) == 4 for _, s in outcome.trained
    )
    for _, s in reference.trained:
        found = greedy[s.prompt.index]
        assert (
            found is not None
            and s.greedy is not None
            and found.tokens == s.greedy.tokens
            and found.score is not None
        )
    spans = [len(set(g.versions)) for g in greedy.values() if g is not None]
    assert max(spans) == 1 if schedule.on_sync is OnSync.DRAIN else max(spans) > 1


def test_interrupted_responses_keep_their_tokens_over_a_restart() -> None:
    """The last one is the greedy baseline."""
    schedule = schedule_of("async_partial", staleness=1.0)
    whole = simulate(schedule, 40, cost=COST, greedy=True)
    cut, index, held = next(
        (cut, i, h)
        for cut in whole.record.cuts
        for i, h in cut.slots
        if h.progress and h.progress[-1].segments and not h.progress[-1].finished
    )
    rest = simulate(schedule, 40, cost=COST, start=cut, greedy=True)
    sample = next(s for _, s in rest.trained if s.prompt.index == index)
    assert sample.greedy is not None
    for before, after in zip(held.progress, (*sample.trajectories, sample.greedy), strict=True):
        assert after.segments[: len(before.segments)] == before.segments


def test_async_partial_is_faster_than_colocated_sync_on_a_long_tail_with_slow_rewards() -> None:
    sync = simulate(schedule_of("colocate_sync", mini=8), 128, cost=COST, slots=64)
    partial = simulate(
        schedule_of("async_partial", mini=8), 128, cost=CostModel(reward_s=0.3, share=0.5), slots=32
    )
    assert partial.seconds < sync.seconds


@pytest.mark.parametrize("mode", ["async_partial", "async_swap", "async_staleness"])
def test_a_step_whose_samples_are_ready_is_sent_before_the_requests_of_a_new_version(
    mode: str,
) -> None:
    firsts: list[str] = []

    def watchers(now: float, ledger: Ledger) -> list[Watcher]:
        looking = False

        def watcher(event: Event) -> None:
            nonlocal looking
            if event.name == "published":
                looking = ledger.can_take()
            elif looking and (event.name, event.phase) in [
                ("train", "state"),
                ("request", "begin"),
            ]:
                firsts.append(event.name)
                looking = False

        return [watcher]

    slow = CostModel(step_s=30.0)
    simulate(schedule_of(mode, staleness=2.0), 80, cost=slow, watchers=watchers)
    assert len(firsts) > 3 and set(firsts) == {"train"}
