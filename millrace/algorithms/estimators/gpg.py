"""GPG: the policy gradient, scaled by the share of useful groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from millrace.algorithms.advantage import AdvantageBatch, AdvantageOptions, estimator
from millrace.algorithms.groups import grouped

if TYPE_CHECKING:
    from torch import Tensor


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
    g = grouped(rewards, groups)
    useful = int((~g.groups.equal(g.rewards)).sum())
    scaled = g.centered() * (len(g.rewards) / max(useful, 1))
    return g.result(scaled / (g.std() + eps if f_norm == "std" else f_norm))


@estimator("gpg", reads={"f_norm", "eps"}, group_relative=True)
def _gpg(batch: AdvantageBatch, options: AdvantageOptions) -> Tensor:
    return gpg(batch.outcomes(), batch.groups, f_norm=options.f_norm, eps=options.eps)
