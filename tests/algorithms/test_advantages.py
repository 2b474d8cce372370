"""Outcome advantages compared with NumPy in float64, and their exact zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.algorithms.estimators.gdpo import gdpo
from millrace.algorithms.estimators.gpg import gpg
from millrace.algorithms.estimators.grpo import grpo
from millrace.algorithms.estimators.grpo_passk import grpo_passk
from millrace.algorithms.estimators.opo import opo
from millrace.algorithms.estimators.rloo import rloo

CALM = settings(deadline=None)
EPS = 1e-6


def opo_of_ones(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return opo(rewards, groups, torch.ones_like(groups))


def gdpo_of_one(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return gdpo({"one": rewards}, groups, weights={"one": 3.0}, norm_by_std=True, eps=EPS)


def plain_grpo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return grpo(rewards, groups, norm_by_std=True, eps=EPS)


def plain_passk(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return grpo_passk(rewards, groups, norm_by_std=True, eps=EPS)


def dr_grpo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return grpo(rewards, groups, norm_by_std=False, eps=EPS)


def plain_gpg(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return gpg(rewards, groups, f_norm=1.0, eps=EPS)


def gpg_by_std(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return gpg(rewards, groups, f_norm="std", eps=EPS)


ALL = [plain_grpo, dr_grpo, plain_passk, rloo, opo_of_ones, plain_gpg, gpg_by_std, gdpo_of_one]


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@CALM
@given(
    n=st.integers(1, 20),
    reward=st.one_of(st.sampled_from([0.1, 0.3, 0.7, 1 / 3]), st.floats(-5, 5)),
)
def test_equal_rewards_give_exactly_zero(
    estimator: Callable[..., Any], dtype: torch.dtype, n: int, reward: float
) -> None:
    got = estimator(torch.full((n,), reward, dtype=dtype), torch.zeros(n, dtype=torch.long))
    assert got.tolist() == [0.0] * n and got.dtype == dtype


@pytest.mark.parametrize("estimator", ALL)
def test_a_group_of_one_has_no_baseline_and_gives_zero(estimator: Callable[..., Any]) -> None:
    assert estimator(torch.tensor([5.0, 1.0, 0.0]), torch.tensor([0, 7, 7])).tolist()[0] == 0.0


@pytest.mark.parametrize("estimator", ALL)
def test_no_trajectories_give_none(estimator: Callable[..., Any]) -> None:
    empty = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    assert estimator(*empty).shape == (0,)


@pytest.mark.parametrize("estimator", ALL)
def test_bad_rewards_are_refused(estimator: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="not finite"):
        estimator(torch.tensor([1.0, float("nan")]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="must both be"):
        estimator(torch.zeros(3), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("estimator", ALL)
def test_rewards_of_any_real_dtype_give_float32(estimator: Callable[..., Any]) -> None:
    assert (
        estimator(torch.tensor([1, 0, 0]), torch.zeros(3, dtype=torch.long)).dtype == torch.float32
    )


def test_passk_gives_a_shared_best_nothing() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5, 0.0])
    got = grpo_passk(rewards, torch.tensor([0, 0, 0, 1, 1, 1]), norm_by_std=False, eps=EPS)
    assert got.tolist() == [0.0, 0.0, 0.0, 0.5, 0.0, 0.0]


def test_gpg_counts_groups_without_a_gradient_and_not_rewards_of_zero() -> None:
    groups = torch.tensor([0, 0, 1, 1])
    assert plain_gpg(torch.tensor([1.0, -1.0, -1.0, -1.0]), groups).tolist() == [
        2.0,
        -2.0,
        0.0,
        0.0,
    ]
    assert plain_gpg(torch.tensor([1.0, 0.0, 0.0, 1.0]), groups).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert plain_gpg(torch.zeros(4), groups).tolist() == [0.0] * 4


def test_opo_defines_what_has_no_tokens() -> None:
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    assert opo(rewards, groups, torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    assert opo(rewards, groups, torch.tensor([3, 0])).tolist() == [0.0, -1.0]
    with pytest.raises(ValueError, match="lengths"):
        opo(rewards, groups, torch.tensor([1]))


def test_gdpo_refuses_what_it_cannot_weigh() -> None:
    groups = torch.tensor([0, 0])
    with pytest.raises(ValueError, match=r"unknown names in weights: \['b'\]"):
        gdpo({"a": torch.zeros(2)}, groups, weights={"b": 1.0}, norm_by_std=True, eps=EPS)
    with pytest.raises(ValueError, match="needs components"):
        gdpo({}, groups, weights=None, norm_by_std=True, eps=EPS)
