"""Advantage estimators of outcomes: from the rewards of trajectories to one number for each of them.

Every function takes rewards [N] of any real dtype and groups [N], integers that are equal for trajectories of one prompt, in
any order, groups of any size; it returns [N] in float64 if the rewards are, else float32, computed in float64, without a
gradient. No trajectories give an empty tensor. All raise ValueError if shapes differ or a reward is not finite.

A group whose rewards are all equal gives exactly 0, and so does a group of one, which has nothing to be compared with. This is
tested on the rewards as they are: the mean of seven 0.3 is not 0.3 in floating point, and what remains, divided by a standard
deviation that is not 0 either, is an advantage made of rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.algorithms.ragged import sequence_sums


def grpo(rewards: Tensor, groups: Tensor, *, norm_by_std: bool, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages: (r_i - mean_g) / (std_g + eps), the std unbiased (GRPO, arXiv 2402.03300, eq. 4).

    `norm_by_std=False` leaves the division out (Dr.GRPO, arXiv 2503.20783).

    verl gives a group of one the raw reward, which pushes up whatever was said, at a scale that no other group has; here it is 0.
    """
    g = _grouped(rewards, groups)
    centered = g.centered()
    return g.result(centered / (g.std()[g.index] + eps) if norm_by_std else centered)


def grpo_passk(rewards: Tensor, groups: Tensor, *, norm_by_std: bool, eps: float = 1e-6) -> Tensor:
    """Pass@k: the best of a group gets (r_1st - r_2nd) / (std_g + eps), the others 0 (arXiv 2503.19595).

    Two that share the best reward have no gap between them: all 0. A group of one gives 0, for pass@k needs a second best; verl
    raises there, in the middle of a run, over a group that has lost its other members. std_g and `norm_by_std` as in `grpo`.
    """
    g = _grouped(rewards, groups)
    best = g.highest(g.rewards)[g.index]
    at_best = g.rewards == best
    alone = at_best & (sequence_sums(at_best.double(), g.index, len(g.size)) == 1)[g.index]
    second = g.highest(g.rewards.masked_fill(at_best, -torch.inf))[g.index]
    gap = torch.where(alone, best - second, 0.0)
    return g.result(gap / (g.std()[g.index] + eps) if norm_by_std else gap)


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """r_i minus the mean of the others of its group = n / (n - 1) (r_i - mean_g) (RLOO, arXiv 2402.14740).

    A group of one leaves no others: 0, as verl's `rloo_vectorized`; its `rloo` gives the raw reward.
    """
    g = _grouped(rewards, groups)
    n = g.size.double()
    return g.result((n / (n - 1).clamp(min=1))[g.index] * g.centered())


def opo(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """r_i - sum_j L_j r_j / sum_j L_j over its group (OPO, arXiv 2505.23585): least variance if squared gradients grow with L.

    lengths [N]: trained tokens L. A group without a token has no baseline and nothing to train: 0, where verl divides 0 by 0.
    A group of one gives 0, which the formula says too (verl leaves the baseline out).
    """
    g = _grouped(rewards, groups)
    if lengths.shape != rewards.shape:
        raise ValueError(f"lengths {tuple(lengths.shape)} must be {tuple(rewards.shape)}")
    length = lengths.detach().double()
    total = sequence_sums(length, g.index, len(g.size))
    # Shares first: where one trajectory has all tokens its share is exactly 1, and its advantage exactly 0.
    baseline = sequence_sums(length / total.clamp(min=1)[g.index] * g.rewards, g.index, len(g.size))
    return g.result((g.rewards - baseline[g.index]).masked_fill((total == 0)[g.index], 0.0))


def gpg(rewards: Tensor, groups: Tensor) -> Tensor:
    """alpha (r_i - mean_g), alpha = N / (N - M), M trajectories being in groups of equal rewards (GPG, arXiv 2504.02546).

    This is the paper's F_norm = 1. alpha undoes the shrinking of a mean over samples of which M have no gradient: those of
    groups that are all right or all wrong, in the paper and in its authors' code. verl counts scores that are not 0 instead: it
    takes a wrong answer for a sample without gradient, and rewards of -1 and 1 get alpha = 1. No gradient at all: all 0.
    """
    g = _grouped(rewards, groups)
    useful = int((~g.equal()[g.index]).sum())
    return g.result(g.centered() * (len(g.rewards) / max(useful, 1)))


def gdpo(
    components: Mapping[str, Tensor],
    groups: Tensor,
    *,
    weights: Mapping[str, float] | None,
    norm_by_std: bool,
) -> Tensor:
    """sum_k w_k grpo(r_k): each reward normalised within its group before they are added (GDPO, arXiv 2601.05242).

    components: name to rewards [N]; weights: name to w_k, 1 where it is not given. Whitening comes after, see `estimators`.
    A component that is equal throughout a group adds exactly 0 there. Raises ValueError without components, and for a weight
    of one that does not exist.
    """
    chosen = dict(weights or {})
    unknown = sorted(set(chosen) - set(components))
    if not components or unknown:
        raise ValueError(
            f"gdpo needs components, has {sorted(components)}; weights of unknown ones: {unknown}"
        )
    parts = [
        grpo(r, groups, norm_by_std=norm_by_std) * chosen.get(name, 1.0)
        for name, r in components.items()
    ]
    return torch.stack(parts).sum(0)


def renumber(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Groups renumbered 0 to G - 1 in ascending order [N], and their sizes [G]."""
    _, index, size = torch.unique(groups, return_inverse=True, return_counts=True)
    return index, size


def all_equal(values: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """Whether the values [N] of each group are one and the same, [num_groups] bool; index [N] as from `renumber`."""
    return _extreme(values, index, num_groups, "amin") == _extreme(
        values, index, num_groups, "amax"
    )


def _extreme(values: Tensor, index: Tensor, num_groups: int, which: str) -> Tensor:
    return values.new_zeros(num_groups).scatter_reduce_(0, index, values, which, include_self=False)


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Rewards [N] in float64, the group of each [N], sizes of groups [G], and the dtype that results have."""

    rewards: Tensor
    index: Tensor
    size: Tensor
    dtype: torch.dtype

    def centered(self) -> Tensor:
        mean = sequence_sums(self.rewards, self.index, len(self.size)) / self.size
        return self.rewards - mean[self.index]

    def std(self) -> Tensor:
        squares = sequence_sums(self.centered().square(), self.index, len(self.size))
        return (squares / (self.size - 1).clamp(min=1)).sqrt()

    def highest(self, values: Tensor) -> Tensor:
        return _extreme(values, self.index, len(self.size), "amax")

    def equal(self) -> Tensor:
        return all_equal(self.rewards, self.index, len(self.size))

    def result(self, advantages: Tensor) -> Tensor:
        """The exact zeros of the module's docstring put in."""
        return advantages.masked_fill(self.equal()[self.index], 0.0).to(self.dtype)


def _grouped(rewards: Tensor, groups: Tensor) -> _Grouped:
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must both be [N]"
        )
    r = rewards.detach().to(torch.float64)
    if not bool(torch.isfinite(r).all()):
        raise ValueError("a reward is not finite")
    index, size = renumber(groups)
    return _Grouped(
        r, index, size, torch.float64 if rewards.dtype == torch.float64 else torch.float32
    )
