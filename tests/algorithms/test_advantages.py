"""Outcome advantages compared with NumPy in float64, and their exact zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
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
REWARD = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.3, 0.7]), st.floats(-100, 100).map(lambda x: round(x, 3))
)
ROWS = st.lists(st.tuples(st.integers(-3, 5), REWARD, st.integers(0, 9)), max_size=40)
"""(group, reward, length). Groups have any size and any order."""


def members(groups: list[int]) -> dict[int, list[int]]:
    return {g: [i for i, x in enumerate(groups) if x == g] for g in set(groups)}


def differ(r: np.ndarray) -> bool:
    return len(set(r.tolist())) > 1


def reference_grpo(r: np.ndarray, norm_by_std: bool, eps: float = 1e-6) -> np.ndarray:
    return (r - r.mean()) / ((r.std(ddof=1) + eps) if norm_by_std else 1.0)


def reference_passk(r: np.ndarray, norm_by_std: bool, eps: float = 1e-6) -> np.ndarray:
    second, first = sorted(r.tolist())[-2:]
    result = np.zeros(len(r))
    result[r.tolist().index(first)] = (first - second) / (
        (r.std(ddof=1) + eps) if norm_by_std else 1.0
    )
    return result


def reference_rloo(r: np.ndarray) -> np.ndarray:
    return np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))])


def reference_opo(r: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return r - (r * lengths).sum() / lengths.sum() if lengths.sum() else np.zeros(len(r))


def by_group(rows: list[tuple[int, float, int]], function: Callable[..., Any]) -> np.ndarray:
    """Apply `function` to the rewards and lengths of each group; equal rewards give 0."""
    result = np.zeros(len(rows))
    for at in members([g for g, _, _ in rows]).values():
        r = np.array([rows[i][1] for i in at], dtype=np.float64)
        if differ(r):
            result[at] = function(r, np.array([rows[i][2] for i in at], dtype=np.float64))
    return result


def tensors(rows: list[tuple[int, float, int]]) -> tuple[torch.Tensor, ...]:
    return (
        torch.tensor([r for _, r, _ in rows], dtype=torch.float64),
        torch.tensor([g for g, _, _ in rows], dtype=torch.long),
        torch.tensor([n for _, _, n in rows], dtype=torch.long),
    )


def close(got: torch.Tensor, expected: np.ndarray) -> None:
    assert got.dtype == torch.float64 and not got.requires_grad
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-9)


@CALM
@given(ROWS, st.booleans())
def test_grpo_matches_numpy_for_groups_of_any_size_in_any_order(
    rows: list[tuple[int, float, int]], norm_by_std: bool
) -> None:
    rewards, groups, _ = tensors(rows)
    close(
        grpo(rewards, groups, norm_by_std=norm_by_std, eps=EPS),
        by_group(rows, lambda r, _: reference_grpo(r, norm_by_std)),
    )


@CALM
@given(ROWS, st.booleans())
def test_passk_matches_numpy(rows: list[tuple[int, float, int]], norm_by_std: bool) -> None:
    rewards, groups, _ = tensors(rows)
    close(
        grpo_passk(rewards, groups, norm_by_std=norm_by_std, eps=EPS),
        by_group(rows, lambda r, _: reference_passk(r, norm_by_std)),
    )


@CALM
@given(ROWS)
def test_rloo_is_the_reward_less_the_mean_of_the_others(rows: list[tuple[int, float, int]]) -> None:
    rewards, groups, _ = tensors(rows)
    close(rloo(rewards, groups), by_group(rows, lambda r, _: reference_rloo(r)))


@CALM
@given(ROWS)
def test_opo_matches_numpy(rows: list[tuple[int, float, int]]) -> None:
    rewards, groups, lengths = tensors(rows)
    close(opo(rewards, groups, lengths), by_group(rows, reference_opo))


@CALM
@given(ROWS, st.sampled_from([1.0, 0.25, "std"]))
def test_gpg_matches_numpy(rows: list[tuple[int, float, int]], f_norm: Any) -> None:
    rewards, groups, _ = tensors(rows)
    valid = sum(
        len(at)
        for at in members(groups.tolist()).values()
        if differ(np.array([rows[i][1] for i in at]))
    )
    alpha = len(rows) / max(valid, 1)
    expected = by_group(rows, lambda r, _: reference_grpo(r, f_norm == "std")) * alpha
    divisor = 1.0 if f_norm == "std" else f_norm
    close(gpg(rewards, groups, f_norm=f_norm, eps=EPS), expected / divisor)


@CALM
@given(ROWS, st.booleans(), st.floats(-2, 2))
def test_gdpo_adds_the_weighted_grpo_of_each_component(
    rows: list[tuple[int, float, int]], norm_by_std: bool, weight: float
) -> None:
    rewards, groups, lengths = tensors(rows)
    parts = {"right": rewards, "short": lengths.double()}
    swapped = [(g, float(n), 0) for g, _, n in rows]
    expected = by_group(rows, lambda r, _: reference_grpo(r, norm_by_std))
    expected += weight * by_group(swapped, lambda r, _: reference_grpo(r, norm_by_std))
    close(
        gdpo(parts, groups, weights={"short": weight}, norm_by_std=norm_by_std, eps=EPS), expected
    )


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
def test_seven_times_point_three_gives_zero_and_leaves_other_groups_alone(
    estimator: Callable[..., Any],
) -> None:
    rewards = torch.tensor([0.0] + [0.3] * 7 + [1.0], dtype=torch.float64)
    groups = torch.tensor([1] + [4] * 7 + [1])
    got = estimator(rewards, groups)
    assert got[1:8].tolist() == [0.0] * 7
    assert got[8] > 0.4 and got[0] <= 0


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
