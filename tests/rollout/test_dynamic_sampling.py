"""Dynamic sampling: the values that it compares, counts and refuses."""

from __future__ import annotations

import pytest

from millrace.errors import ConfigError
from millrace.rollout.dynamic_sampling import DynamicSampling, DynamicSamplingError
from millrace.types import Prompt, Sample, Score, Trajectory, tokens_of


def sample(*scores: Score, greedy: Score | None = None) -> Sample:
    trajectories = tuple(Trajectory.of((), score) for score in scores)
    return Sample(
        Prompt(0, tokens_of([1]), "", "d"),
        trajectories,
        greedy=Trajectory.of((), greedy) if greedy else None,
    )


def sampling(metric: str = "score", cap: int = 0, window: int = 2) -> DynamicSampling:
    return DynamicSampling(metric, max_num_gen_batches=cap, window=window)


EQUAL = sample(Score(1.0), Score(1.0))
WRONG = sample(Score(0.0), Score(0.0))
MIXED = sample(Score(1.0), Score(0.0))
SHAPED = sample(Score(1.0, {"acc": 1.0}, 1.0), Score(0.5, {"acc": 1.0}, 1.0))
"""Both trajectories are right, and one is too long."""
EVENED = sample(Score(0.5, {"acc": 0.0}, 0.5), Score(0.5, {"acc": 1.0}, 1.0))
"""A penalty makes the rewards equal."""


@pytest.mark.parametrize(
    ("metric", "equal", "kept"),
    [
        ("score", SHAPED, EVENED),
        ("reward", EVENED, SHAPED),
        ("acc", SHAPED, EVENED),
        ("score", EQUAL, MIXED),
    ],
)
def test_outcomes_are_compared_before_shaping_after_it_or_by_a_component(
    metric: str, equal: Sample, kept: Sample
) -> None:
    assert not sampling(metric).keeps(equal, 0) and sampling(metric).keeps(kept, 0)


def test_the_greedy_response_is_none_of_the_outcomes() -> None:
    assert not sampling().keeps(sample(Score(1.0), Score(1.0), greedy=Score(0.0)), 0)


@pytest.mark.parametrize(
    "scores",
    [
        (Score(1.0, {"b": 1.0, "a": 0.0}),) * 2,
        (Score(1.0, {"acc": 1.0}), Score(1.0, {"b": 1.0, "a": 0.0})),
    ],
)
def test_a_metric_that_a_reward_lacks_is_an_error_that_names_those_it_has(
    scores: tuple[Score, ...],
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"algorithm\.filter_groups\.metric = 'acc': .*Fix: one of score, reward, a, b\.",
    ):
        sampling("acc").keeps(sample(*scores), 0)


def test_a_row_has_what_was_finished_while_its_version_was_live_and_is_asked_for_once() -> None:
    s = sampling()
    for version, each in ((3, EQUAL), (3, WRONG), (3, EQUAL), (3, MIXED), (4, MIXED)):
        s.keeps(each, version)
    assert s.row(3) == {
        "filter_groups/dropped": 3.0,
        "filter_groups/drop_share": 0.75,
        "filter_groups/mean_outcome": 2 / 3,
    }
    assert s.row(4) == {"filter_groups/dropped": 0.0, "filter_groups/drop_share": 0.0}
    assert s.row(3) == {"filter_groups/dropped": 0.0, "filter_groups/drop_share": 0.0} == s.row(9)


def test_the_mean_outcome_is_that_of_the_metric() -> None:
    s = sampling("reward")
    s.keeps(EVENED, 0)
    assert s.row(0)["filter_groups/mean_outcome"] == 0.5


def test_the_cap_is_windows_of_drops_for_one_version() -> None:
    s = sampling(cap=2)
    for version in (0, 1):
        assert [s.keeps(WRONG, version) for _ in range(4)] == [False] * 4
        assert s.keeps(MIXED, version)
    with pytest.raises(DynamicSamplingError) as caught:
        s.keeps(WRONG, 1)
    for part in (
        "5 of the 6 samples (83%) finished while version 1 was live had trajectories of equal score",
        "more than algorithm.filter_groups.max_num_gen_batches = 2 windows of 2",
        "Their mean score is 0",
        "harder problems",
        "easier ones",
        "larger rollout.n",
        "higher algorithm.filter_groups.max_num_gen_batches",
    ):
        assert part in str(caught.value)


def test_a_cap_of_0_sets_no_limit() -> None:
    s = sampling(cap=0)
    assert not any(s.keeps(WRONG, 0) for _ in range(1000))
