"""GRPO advantages against NumPy in float64, and their exact zeros."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.algorithms.advantages import equal_groups, grpo

GROUPED = st.lists(
    st.tuples(st.integers(-3, 5), st.floats(-100, 100).map(lambda x: round(x, 3))),
    min_size=1,
    max_size=40,
)


def reference(rewards, groups, norm_by_std, eps=1e-6):
    result = np.zeros(len(rewards))
    for g in set(groups):
        at = [i for i, x in enumerate(groups) if x == g]
        r = np.array([rewards[i] for i in at], dtype=np.float64)
        if len(set(r.tolist())) == 1:
            continue
        result[at] = (r - r.mean()) / ((r.std(ddof=1) + eps) if norm_by_std else 1.0)
    return result


@given(GROUPED, st.booleans())
def test_grpo_matches_numpy_for_groups_of_any_size_in_any_order(rows, norm_by_std):
    groups, rewards = [g for g, _ in rows], [r for _, r in rows]
    got = grpo(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), norm_by_std=norm_by_std)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), reference(rewards, groups, norm_by_std), rtol=1e-6, atol=1e-7)


@given(st.integers(1, 20), st.floats(-5, 5), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_equal_rewards_give_exactly_zero(n, reward, norm_by_std, dtype):
    got = grpo(torch.full((n,), reward, dtype=dtype), torch.zeros(n, dtype=torch.long), norm_by_std=norm_by_std)
    assert got.tolist() == [0.0] * n


def test_seven_times_point_three_gives_zero_and_leaves_other_groups_alone():
    rewards = torch.tensor([0.3] * 7 + [0.0, 1.0])
    groups = torch.tensor([4] * 7 + [1, 1])
    got = grpo(rewards, groups)
    assert got[:7].tolist() == [0.0] * 7
    assert got[7:].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)
    assert equal_groups(rewards, groups).tolist() == [False, True]  # ascending by group number


def test_a_group_of_one_has_no_baseline_and_gives_zero():
    assert grpo(torch.tensor([5.0]), torch.tensor([0])).tolist() == [0.0]
    assert grpo(torch.tensor([5.0]), torch.tensor([0]), norm_by_std=False).tolist() == [0.0]
    assert equal_groups(torch.tensor([5.0]), torch.tensor([0])).tolist() == [True]


def test_no_trajectories_give_none():
    empty = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    assert grpo(*empty).shape == (0,)
    assert equal_groups(*empty).shape == (0,)


def test_bad_rewards_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        grpo(torch.tensor([1.0, float("nan")]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="must both be"):
        grpo(torch.zeros(3), torch.zeros(2, dtype=torch.long))
