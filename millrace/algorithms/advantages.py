"""Outcome advantage estimators: one number for each trajectory, from the rewards.

Every function takes rewards [N] of any real dtype and groups [N]. Groups are integers, equal for
trajectories of one prompt, in any order and of any size. The result has no gradient. It is computed
in float64, and returned in float64 if the rewards have that dtype, else in float32. Without
trajectories it is empty. All functions raise ValueError if shapes differ or a reward is not finite.

A group with equal rewards gets exactly 0. So does a group of one, because it has no other
trajectory to compare with. The test for equality uses the rewards themselves, not their standard
deviation. In floating point, the mean of seven times 0.3 is not 0.3, and the standard deviation is
not 0. Their quotient would be an advantage made of rounding errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from millrace.algorithms.groups import Groups
from millrace.algorithms.ragged import result_dtype


def grpo(rewards: Tensor, groups: Tensor, *, norm_by_std: bool, eps: float) -> Tensor:
    """Compute (r_i - mean_g) / (std_g + eps), with an unbiased std (GRPO, arXiv 2402.03300, eq. 4).

    `norm_by_std=False` omits the division (Dr.GRPO, arXiv 2503.20783).

    For a group of one, this function returns 0. verl returns the raw reward. That reinforces any
    response, at a scale that no other group has.
    """
    g = _grouped(rewards, groups)
    centered = g.centered()
    return g.result(centered / (g.std() + eps) if norm_by_std else centered)


def grpo_passk(rewards: Tensor, groups: Tensor, *, norm_by_std: bool, eps: float) -> Tensor:
    """Give (r_1st - r_2nd) / (std_g + eps) to the best of a group, and 0 to the others.

    This is pass@k (arXiv 2503.19595). If two trajectories share the best reward, all get 0. A group
    of one also gets 0, because pass@k needs a second best. (verl raises an error for it. A run then
    ends if only one trajectory of a group remains.) std_g and `norm_by_std` are as in `grpo`.
    """
    g = _grouped(rewards, groups)
    best = g.each(g.groups.extreme(g.rewards, "amax"))
    at_best = g.rewards == best
    alone = at_best & g.each(g.groups.total(at_best.double()) == 1)
    second = g.each(g.groups.extreme(g.rewards.masked_fill(at_best, -torch.inf), "amax"))
    gap = torch.where(alone, best - second, 0.0)
    return g.result(gap / (g.std() + eps) if norm_by_std else gap)


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Compute r_i minus the mean of the other rewards of its group (RLOO, arXiv 2402.14740).

    This equals n / (n - 1) (r_i - mean_g). A group of one has no other rewards and gets 0, as in
    verl's `rloo_vectorized`. For such a group, verl's `rloo` returns the raw reward.
    """
    g = _grouped(rewards, groups)
    n = g.groups.size.double()
    return g.result(g.each(n / (n - 1).clamp(min=1)) * g.centered())


def opo(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Compute r_i - sum_j L_j r_j / sum_j L_j over the group of i (OPO, arXiv 2505.23585).

    This baseline has the least variance if squared gradients are proportional to L. lengths [N] are
    the numbers L of trained tokens. A group without tokens has nothing to train and gets 0 (verl
    divides 0 by 0). A group of one gets 0, as the formula gives (verl omits the baseline).
    """
    g = _grouped(rewards, groups)
    if lengths.shape != rewards.shape:
        raise ValueError(f"lengths {tuple(lengths.shape)} must be {tuple(rewards.shape)}")
    length = lengths.detach().double()
    total = g.each(g.groups.total(length))
    # Compute the shares first. If one trajectory has all tokens, its share is exactly 1, and its
    # advantage is exactly 0.
    baseline = g.each(g.groups.total(length / total.clamp(min=1) * g.rewards))
    return g.result((g.rewards - baseline).masked_fill(total == 0, 0.0))


def gpg(rewards: Tensor, groups: Tensor, *, f_norm: float | Literal["std"], eps: float) -> Tensor:
    """Compute alpha (r_i - mean_g) / F_norm with alpha = N / (N - M) (GPG, arXiv 2504.02546).

    N is the number of trajectories, and M the number of those in groups of equal rewards. The M
    trajectories have no gradient and shrink a mean over all trajectories. alpha corrects this. If
    no trajectory has a gradient, all advantages are 0.

    `f_norm` is the divisor F_norm, a number or "std": std_g + eps of `grpo`. GPG has 1, and "std"
    is GRPO's divisor. verl's function takes a number, and no key of verl sets it.

    In the paper and in its authors' code, groups of equal rewards are those that are all right or
    all wrong. Instead of N - M, verl counts the scores that are not 0. It thereby treats a wrong
    answer as a sample without gradient. With rewards of -1 and 1, its alpha is 1.
    """
    g = _grouped(rewards, groups)
    useful = int((~g.groups.equal(g.rewards)).sum())
    scaled = g.centered() * (len(g.rewards) / max(useful, 1))
    return g.result(scaled / (g.std() + eps if f_norm == "std" else f_norm))


def gdpo(
    components: Mapping[str, Tensor],
    groups: Tensor,
    *,
    weights: Mapping[str, float] | None,
    norm_by_std: bool,
    eps: float,
) -> Tensor:
    """Compute sum_k w_k grpo(r_k): each reward is normalised within its group, then all are added.

    (GDPO, arXiv 2601.05242.) `components` are the rewards by name, each [N]. `weights` are the w_k
    by name, 1 for a missing name. `estimators` whitens afterwards. A component that is equal within
    a group adds exactly 0 in that group.

    Raises ValueError without components, and for a weight of an unknown component.
    """
    chosen = dict(weights or {})
    unknown = sorted(set(chosen) - set(components))
    if not components or unknown:
        raise ValueError(
            f"gdpo needs components, got {sorted(components)}; unknown names in weights: {unknown}"
        )
    parts = [
        grpo(r, groups, norm_by_std=norm_by_std, eps=eps) * chosen.get(name, 1.0)
        for name, r in components.items()
    ]
    return torch.stack(parts).sum(0)


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Rewards [N] in float64, their groups, and the dtype of results."""

    rewards: Tensor
    groups: Groups
    dtype: torch.dtype

    def each(self, values: Tensor) -> Tensor:
        """Give each trajectory the value [G] of its group, [N]."""
        return values[self.groups.index]

    def centered(self) -> Tensor:
        return self.groups.centered(self.rewards)

    def std(self) -> Tensor:
        """Return the unbiased standard deviation of each trajectory's group, [N]."""
        squares = self.groups.total(self.centered().square())
        return self.each((squares / (self.groups.size - 1).clamp(min=1)).sqrt())

    def result(self, advantages: Tensor) -> Tensor:
        """Set groups of equal rewards to exactly 0, and cast to the dtype of results."""
        return advantages.masked_fill(self.groups.equal(self.rewards), 0.0).to(self.dtype)


def _grouped(rewards: Tensor, groups: Tensor) -> _Grouped:
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must both be [N]"
        )
    r = rewards.detach().to(torch.float64)
    if not bool(torch.isfinite(r).all()):
        raise ValueError("a reward is not finite")
    return _Grouped(r, Groups.of(groups), result_dtype(rewards))
