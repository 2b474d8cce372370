"""Token estimators compared with NumPy loops that follow the definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.algorithms.estimators.gae import gae
from millrace.algorithms.estimators.optimal_token_baseline import optimal_token_baseline
from millrace.algorithms.estimators.remax import remax
from millrace.algorithms.returns import discounted_sums, place_scores, whiten

CALM = settings(deadline=None, max_examples=60)


def ints(x: Any) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.long)


def test_gae_without_discount_is_the_reward_to_go_less_the_value() -> None:
    lengths, r, v = (
        ints([3, 0, 2]),
        torch.tensor([0, 0, 1.0, 0, -1]),
        torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]),
    )
    got, targets = gae(r, v, lengths, gamma=1.0, lam=1.0)
    assert got.tolist() == pytest.approx([0.9, 0.8, 0.7, -1.4, -1.5])
    assert targets.tolist() == pytest.approx([1, 1, 1, -1, -1])
    one_step, _ = gae(r, v, lengths, gamma=1.0, lam=0.0)
    assert one_step.tolist() == pytest.approx([0.1, 0.1, 0.7, 0.1, -1.5])


def otb(lengths: Any, groups: Any, scores: Any, prob: Any = 0.5) -> Any:
    t = sum(lengths)
    log_probs = torch.full((t,), prob).log()
    return optimal_token_baseline(
        place_scores(torch.tensor(scores), ints(lengths)),
        ints(lengths),
        ints(groups),
        log_probs,
        torch.full((t,), prob**2),
    )


def test_a_token_without_a_peer_at_its_position_gets_zero() -> None:
    assert otb([3], [0], [0.3]).tolist() == [0.0] * 3
    got = otb([4, 2], [0, 0], [1.0, 0.0])
    assert got.tolist() == pytest.approx([0.5, 0.5, 0.0, 0.0, -0.5, -0.5])
    assert got[2:4].tolist() == [0.0, 0.0]


@CALM
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=9),
    st.sampled_from([0.1, 0.3, 0.7]),
    st.sampled_from([0.2, 1.0]),
)
def test_equal_scores_give_an_optimal_token_baseline_of_exactly_zero(
    lengths: Any, score: Any, prob: Any
) -> None:
    assert not otb(lengths, [3] * len(lengths), [score] * len(lengths), prob).any()


def test_a_policy_that_is_sure_of_every_token_has_the_plain_mean_for_a_baseline() -> None:
    assert otb([1, 1, 1], [0, 0, 0], [1.0, 0.0, 0.5], prob=1.0).tolist() == pytest.approx(
        [0.5, -0.5, 0.0]
    )


def test_values_that_nearly_agree_are_whitened_with_the_slack_of_their_variance() -> None:
    got = whiten(torch.tensor([0.0, 2e-4], dtype=torch.float64))
    assert got.tolist() == pytest.approx([-1e-4 / 3e-8**0.5, 1e-4 / 3e-8**0.5], rel=1e-9)


@CALM
@given(
    st.integers(0, 30),
    st.sampled_from([0.1, 0.3, 0.7, 1e9]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_equal_values_are_whitened_to_exactly_zero(n: Any, value: Any, dtype: Any) -> None:
    got = whiten(torch.full((n,), value, dtype=dtype))
    assert got.tolist() == [0.0] * n and got.dtype == dtype


def test_nothing_here_has_a_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    lengths = ints([2, 1])
    assert not any(a.requires_grad for a in gae(x, x, lengths, gamma=1.0, lam=1.0))
    for got in (
        whiten(x),
        discounted_sums(x, lengths, 1.0),
        remax(x, lengths, x[:2]),
        place_scores(x[:2], lengths, x),
        optimal_token_baseline(x, lengths, ints([0, 0]), -x, x, x),
    ):
        assert not got.requires_grad and got.dtype == torch.float32
