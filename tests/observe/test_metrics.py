"""The metrics of a toy version. Each expected value is computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.config import GuardConfig
from millrace.observe.guard import Guard
from millrace.observe.metrics import RunCounts, Synced, VersionMetrics, percentile
from millrace.observe.timing import live_row
from millrace.ports import RolloutStats, StepReport, TransferReport
from millrace.schedule.continuation import next_prompt
from millrace.types import (
    WINDOW,
    Author,
    Prompt,
    Sample,
    Score,
    Segment,
    Stop,
    Trajectory,
    floats_of,
    tokens_of,
)


def said(version: int, length: int, stop: Stop | None = Stop.EOS) -> Segment:
    return Segment(
        tokens_of([1] * length), version=version, log_probs=floats_of([-1.0] * length), stop=stop
    )


def trajectory(*segments: Segment, score: float | None = 1.0, **extra: float) -> Trajectory:
    return Trajectory.of(segments, None if score is None else Score(score, extra))


def sample(index: int, prompt_length: int, admitted: int, *trajectories: Trajectory) -> Sample:
    return Sample(Prompt(index, tokens_of([1] * prompt_length), "", "d"), trajectories, admitted)


def row_of(metrics: VersionMetrics, **changes: Any) -> dict[str, float]:
    """Return the row of a version without time, rollouts and a sync."""
    given: dict[str, Any] = {"timing": {}, "before": RolloutStats(), "after": RolloutStats()}
    return metrics.row(**given | {"usable_slots": 1, "synced": Synced()} | changes)


def stepped(version: int, *samples: Sample) -> VersionMetrics:
    """Return the metrics of one step on these samples."""
    metrics = VersionMetrics()
    metrics.stepped(samples, version, StepReport(1))
    return metrics


TOOL = Segment(tokens_of([5, 5]), Author.ENVIRONMENT)
# Trained while version 3 is live, in two local steps.
FIRST = [
    sample(
        0, 4, 1, trajectory(said(1, 2, None), said(3, 3)), trajectory(said(1, 4), score=0.0)
    ),  # ages 2 and 2, span 2 and 0
    sample(
        1,
        6,
        3,
        trajectory(said(3, 8, Stop.LENGTH), score=0.5, format=1.0),
        trajectory(said(3, 1), score=0.5, format=0.5),
    ),
]
SECOND = [
    sample(
        2, 2, 2, trajectory(said(2, 1, None), TOOL, said(3, 2)), trajectory(said(3, 4), score=0.0)
    )
]  # ages 1 and 0, span 1


def collected() -> VersionMetrics:
    metrics = VersionMetrics()
    metrics.drawn(2.0, 7.5)
    metrics.drawn(1.5, 6.0)
    metrics.stepped(
        FIRST,
        3,
        StepReport(
            2,
            {"actor/pg_loss": 0.3, "actor/rare": 4.0},
            {"train/tokens": 30.0, "actor/nonfinite_steps": 1.0},
            seconds={"old_log_prob": 0.5, "adv": 0.25, "update_actor": 2.0},
        ),
    )
    metrics.stepped(
        SECOND,
        3,
        StepReport(
            1,
            {"actor/pg_loss": 0.9},
            {"train/tokens": 12.0, "actor/nonfinite_steps": 0.0},
            seconds={"ref": 0.5, "update_actor": 1.0},
        ),
    )
    return metrics


TIMING = {
    "wait_samples": 0.25,
    "wait_prev_gen": 1.5,
    "wait_rollouts": 0.25,
    "wait_validation": 0.5,
    "train": 5.0,
    "sync_transfer": 1.5,
    "other": 1.0,
}
SECONDS = TIMING | {
    "old_log_prob": 0.5,
    "ref": 0.5,
    "adv": 0.25,
    "update_actor": 3.0,
    "train_other": 0.75,
    "step": 10.0,
    "gen": 1.75,
    "sync": 1.75,
}


def row(**changes: Any) -> dict[str, float]:
    given = {
        "timing": TIMING,
        "before": RolloutStats(tokens=100, prefill_tokens=50, busy_slot_s=7.0, slots=16),
        "after": RolloutStats(tokens=160, prefill_tokens=75, busy_slot_s=47.0, slots=16),
        "usable_slots": 8,
        "synced": Synced(TransferReport(4096, 1.25), 0.125, 0.25, live_row(8.0, 6.0)),
    }
    return row_of(collected(), **given | changes)


EXPECTED = {
    "actor/pg_loss": (0.3 * 2 + 0.9) / 3,
    "actor/rare": 4.0,  # the mean over the steps that report it
    "train/tokens": 42.0,
    "actor/nonfinite_steps": 1.0,
    "train/optimizer_steps": 3.0,
    "train/samples": 3.0,
    "reward/mean": (1 + 0 + 0.5 + 0.5 + 1 + 0) / 6,
    "reward/std": (3 * 0.25 / 6 + 0.25 / 6 + 0) ** 0.5,
    "reward/format/mean": 0.75,
    "response_length/mean": (5 + 4 + 8 + 1 + 5 + 4) / 6,
    "response_length/max": 8.0,
    "response_length/min": 1.0,
    "response_length/p50": 4.5,  # of 1, 4, 4, 5, 5, 8
    "response_length/p90": 5 + 0.5 * 3,
    "response_length/p99": 5 + 0.95 * 3,
    "response_length/clip_ratio": 1 / 6,
    "prompt_length/mean": 4.0,
    "fully_async/count/stale_samples_processed": 2.0,
    "fully_async/count/stale_trajectory_processed": 3.0,
    "fully_async/partial/total_partial_num": 2.0,
    "fully_async/partial/partial_ratio": 2 / 6,
    "fully_async/partial/max_partial_span": 2.0,
    "staleness/mean": (2 + 2 + 0 + 0 + 1 + 0) / 6,
    "staleness/max": 2.0,
    "staleness/hist/0": 3.0,
    "staleness/hist/1": 1.0,
    "staleness/hist/2": 2.0,
    "staleness/token_hist/0": 3.0 + 9.0 + 2.0 + 4.0,
    "staleness/token_hist/1": 1.0,
    "staleness/token_hist/2": 2.0 + 4.0,
    **{f"timing_s/{name}": seconds for name, seconds in SECONDS.items()},
    **{f"timing_share/{name}": s / 10.0 for name, s in SECONDS.items() if name != "step"},
    "perf/time_per_version": 10.0,
    "trainer/idle_ratio": 0.25,
    "fully_async/trainer/idle_ratio": 0.175,
    "fully_async/rollouter/version_time": 8.0,
    "fully_async/rollouter/active_time": 6.0,
    "fully_async/rollouter/idle_ratio": 0.25,
    "rollouter/generate_sequences_s": 6.0,
    "rollouter/idle_ratio": 1 - 40 / (8 * 10),
    "rollouter/tokens_per_s": 6.0,
    "rollouter/prefill_tokens_per_s": 2.5,
    "perf/throughput": 2.7,
    "perf/samples_per_s": 0.3,
    "sync/bytes": 4096.0,
    "sync/transfer_s": 1.25,
    "sync/pause_s": 0.125,
    "sync/hold_s": 0.25,
}


def test_every_metric_of_a_toy_version_is_the_one_computed_by_hand() -> None:
    """The row has all names of this table and no others: a new metric must be added here."""
    assert row() == pytest.approx(EXPECTED)


def test_the_engines_slots_bound_the_idle_ratio_where_the_schedule_could_fill_more() -> None:
    assert row(usable_slots=1000)["rollouter/idle_ratio"] == pytest.approx(1 - 40 / 160)


def test_a_version_in_which_no_response_ended_has_no_reward_and_raises_no_alarm() -> None:
    """With windows, the first versions train responses that go on. Their reward is not 0."""

    def row_of(*samples: Sample) -> dict[str, float]:
        metrics = VersionMetrics()
        metrics.stepped(samples, 0, StepReport(1, {}))
        return metrics.row(
            timing={},
            before=RolloutStats(),
            after=RolloutStats(),
            usable_slots=8,
            synced=Synced(TransferReport(0, 0.0), 0.0),
        )

    first = sample(0, 4, 0, trajectory(said(0, 3, None), score=None))
    goes_on = replace(first, trajectories=(replace(first.trajectories[0], ended=WINDOW),))
    prompt = replace(next_prompt(goes_on, floats_of([0.0] * 3)), index=1)
    guard = Guard(GuardConfig())
    for version in range(1, 6):
        row = row_of(goes_on)
        assert guard.check(version, row) == []
    assert row["windows/ended_share"] == 0
    assert not {"reward/mean", "reward/std", "windows/mean"} & set(row)
    row = row_of(goes_on, sample(1, 4, 0, trajectory(said(1, 2), score=0.5)))
    assert (row["windows/ended_share"], row["windows/mean"]) == (0.5, 1)
    ended = replace(sample(1, 4, 0, trajectory(said(1, 2), score=0.5)), prompt=prompt)
    row = row_of(goes_on, ended)
    assert (row["reward/mean"], row["windows/mean"]) == (0.5, 2)
    assert row["windows/response_length/mean"] == row["windows/response_length/max"] == 5


def test_fractions_stay_between_0_and_1_whatever_clocks_say() -> None:
    """Two processes measure the times.

    Busy slots may therefore exceed the wall time, and a period may be empty.
    """
    busier = row(after=RolloutStats(tokens=100, prefill_tokens=50, busy_slot_s=1000.0, slots=16))
    empty = row_of(VersionMetrics(), usable_slots=8)
    for each in (row(), busier, empty):
        for name, value in each.items():
            if name.endswith(("_ratio", "idle_ratio")):
                assert 0 <= value <= 1, name
    assert busier["rollouter/idle_ratio"] == 0.0 and empty["rollouter/tokens_per_s"] == 0.0


def test_shaped_rewards_show_what_is_trained_on_and_what_was_said_and_a_greedy_baseline_is_apart() -> (
    None
):
    """The greedy response is older, longer and better than all others. No other figure changes."""
    shaped = [
        Trajectory.of((said(3, 2),), Score(value, {"overlong_reward": value - 1}, 1.0))
        for value in (0.5, 1.0)
    ]
    greedy = Trajectory.of((said(0, 50),), Score(7.0, raw=8.0))
    both = (sample(0, 1, 3, *shaped), replace(sample(0, 1, 3, *shaped), greedy=greedy))
    without, found = (row_of(stepped(3, each), timing={"step": 1.0}) for each in both)
    names = ("reward/mean", "reward/score/mean", "reward/overlong_reward/mean")
    assert [found[name] for name in names] == [0.75, 1.0, -0.25]
    assert found == without | {"reward/greedy/mean": 7.0}


@given(st.lists(st.integers(0, 100_000), min_size=1), st.sampled_from([0, 50, 90, 99, 100]))
def test_percentiles_are_numpys(values: list[int], p: int) -> None:
    assert percentile(sorted(values), p) == pytest.approx(float(np.percentile(values, p)))


@pytest.mark.parametrize(
    "name, value",
    [
        ("staleness/token_max", 3.0),
        ("rollout_corr/rollout_is_seq_max_deviation", 3.0),
        ("rollout_corr/log_ppl_diff_min", 1.0),
        ("rollout_corr/rollout_rs_seq_max_k1_mean", 1.5),
    ],
)
def test_a_row_has_the_extremes_of_its_batches_and_the_means_of_all_else(
    name: str, value: float
) -> None:
    metrics = VersionMetrics()
    for steps, own in ((3, 1.0), (1, 3.0)):
        metrics.stepped([], 3, StepReport(steps, {name: own}))
    assert row_of(metrics)[name] == value


def test_the_counts_of_a_run_go_on_from_its_checkpoint() -> None:
    rows = [
        {
            "fully_async/count/stale_samples_processed": samples,
            "fully_async/count/stale_trajectory_processed": trajectories,
            "train/optimizer_steps": 4.0,
        }
        for samples, trajectories in ((2.0, 5.0), (0.0, 0.0), (1.0, 4.0))
    ]
    whole = RunCounts({"actor_warmup_steps": 7.0})
    assert [list(whole.add(row).values()) for row in rows[:2]] == [[2.0, 5.0], [2.0, 5.0]]
    saved = whole.counts
    assert saved["optimizer_steps"] == 8.0 and saved["actor_warmup_steps"] == 7.0
    assert RunCounts(saved).add(rows[2]) == whole.add(rows[2])
    assert list(whole.add({}).values()) == [3.0, 9.0]
    assert saved["optimizer_steps"] == 8.0, "a checkpoint that is being written does not change"


def test_a_trajectory_that_says_nothing_is_as_old_as_now() -> None:
    found = row_of(stepped(2, sample(0, 1, 2, trajectory(score=None))))
    assert found["staleness/hist/0"] == 1.0 and found["reward/mean"] == 0.0
    assert found["fully_async/partial/max_partial_span"] == 0.0


def test_counts_of_agents_are_means_shares_or_sums_and_missing_without_agents() -> None:
    def row(*counts: dict[str, float]) -> dict[str, float]:
        episodes = (replace(trajectory(said(0, 2)), counts=c) for c in counts)
        whole = row_of(stepped(0, sample(0, 1, 0, *episodes)), timing={"step": 1.0})
        return {name: value for name, value in whole.items() if name.startswith("agents/")}

    assert row({}, {}) == {}
    one = {"turns": 3.0, "threads": 1.0, "context_tokens": 10.0, "ended/done": 1.0}
    two = {"turns": 1.0, "threads": 2.0, "context_tokens": 4.0, "ended/turns": 1.0}
    two["forks/edited"] = 2.0
    assert row(one, two | {"dead_turns": 1.0}) == {
        "agents/turns/mean": 2.0,
        "agents/turns/max": 3.0,
        "agents/threads/mean": 1.5,
        "agents/threads/max": 2.0,
        "agents/context_tokens/mean": 7.0,
        "agents/context_tokens/max": 10.0,
        "agents/ended/done": 0.5,
        "agents/ended/turns": 0.5,
        "agents/forks/edited": 2.0,
        "agents/dead_turns": 1.0,
    }


def test_kv_of_older_weights_is_a_figure_of_its_own() -> None:
    def segment(version: int, kv_version: int | None, tokens: int) -> Segment:
        return replace(said(version, tokens), kv_version=kv_version)

    def row(*segments: Segment) -> dict[str, float]:
        before = RolloutStats(reused_tokens=30)
        after = RolloutStats(reused_tokens=50, evicted_tokens=4)
        metrics = stepped(5, sample(0, 1, 2, trajectory(*segments)))
        return row_of(metrics, timing={"train": 2.0}, before=before, after=after)

    found = row(segment(3, None, 6), TOOL, segment(4, 1, 2), segment(5, 3, 4))
    assert found["staleness/kv_mean"] == pytest.approx((2 * 3 + 4 * 2) / 12)
    assert found["staleness/kv_max"] == 3.0
    assert found["rollouter/reused_tokens_per_s"] == 10.0
    assert found["rollouter/evicted_tokens_per_s"] == 2.0
    assert "staleness/kv_mean" not in row(segment(3, None, 6), segment(4, 4, 2))
