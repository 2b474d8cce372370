"""Advantage estimators: from the rewards of trajectories to one number for each of them."""

from __future__ import annotations

import torch
from torch import Tensor


def grpo(rewards: Tensor, groups: Tensor, *, norm_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages: (r_i - mean_g) / (std_g + eps), the std unbiased (GRPO, arXiv 2402.03300, eq. 4).

    `norm_by_std=False` leaves the division out (Dr.GRPO, arXiv 2503.20783).

    rewards [N] of any real dtype; groups [N] integers, equal for trajectories of one prompt, in any order, groups of any
    size. Returns [N] in float64 if `rewards` is, else float32; computed in float64.

    A group whose rewards are all equal gives exactly 0: this is tested on the rewards, for the mean of seven 0.3 is not 0.3 in
    floating point and the std of the differences is not 0. A group of one gives 0 too: it has no other trajectory to be
    compared with. (verl gives the raw reward there, which pushes up whatever was said, at a scale that no other group has.)
    No trajectories give an empty tensor. Raises ValueError if shapes differ or a reward is not finite.
    """
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must both be [N]")
    r = rewards.detach().to(torch.float64)
    if not bool(torch.isfinite(r).all()):
        raise ValueError("a reward is not finite")
    out_dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    index, size = _dense(groups)
    mean = _group_sum(r, index, size) / size
    centered = r - mean[index]
    advantages = centered
    if norm_by_std:
        std = (_group_sum(centered.square(), index, size) / (size - 1).clamp(min=1)).sqrt()
        advantages = centered / (std[index] + eps)
    return advantages.masked_fill(_equal(r, index, len(size))[index], 0.0).to(out_dtype)


def equal_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """Whether all rewards of a group are equal, [G] bool in ascending order of group number; true for a group of one.

    Such groups give no gradient. Compared on the rewards as they are, without a tolerance.
    """
    index, size = _dense(groups)
    return _equal(rewards.detach(), index, len(size))


def _dense(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Groups renumbered 0 to G - 1 [N], and their sizes [G]."""
    _, index, size = torch.unique(groups, return_inverse=True, return_counts=True)
    return index, size


def _group_sum(values: Tensor, index: Tensor, size: Tensor) -> Tensor:
    return values.new_zeros(len(size)).index_add_(0, index, values)


def _equal(rewards: Tensor, index: Tensor, num_groups: int) -> Tensor:
    low = rewards.new_zeros(num_groups).scatter_reduce_(0, index, rewards, "amin", include_self=False)
    high = rewards.new_zeros(num_groups).scatter_reduce_(0, index, rewards, "amax", include_self=False)
    return low == high
