"""Pass@k."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.algorithms.advantage import AdvantageBatch, AdvantageOptions, estimator
from millrace.algorithms.groups import grouped

if TYPE_CHECKING:
    from torch import Tensor


def grpo_passk(rewards: Tensor, groups: Tensor, *, norm_by_std: bool, eps: float) -> Tensor:
    """Give (r_1st - r_2nd) / (std_g + eps) to the best of a group, and 0 to the others.

    This is pass@k (arXiv 2503.19595). If two trajectories share the best reward, all get 0. A group
    of one also gets 0, because pass@k needs a second best. (verl raises an error for it. A run then
    ends if only one trajectory of a group remains.) std_g and `norm_by_std` are as in `grpo`.
    """
    g = grouped(rewards, groups)
    best = g.each(g.groups.extreme(g.rewards, "amax"))
    at_best = g.rewards == best
    alone = at_best & g.each(g.groups.total(at_best.double()) == 1)
    second = g.each(g.groups.extreme(g.rewards.masked_fill(at_best, float("-inf")), "amax"))
    gap = (best - second).where(alone, 0.0)
    return g.result(gap / (g.std() + eps) if norm_by_std else gap)


@estimator("grpo_passk", reads={"norm_by_std", "eps"}, group_relative=True)
def _grpo_passk(batch: AdvantageBatch, options: AdvantageOptions) -> Tensor:
    by_std, eps = options.norm_by_std, options.eps
    return grpo_passk(batch.outcomes(), batch.groups, norm_by_std=by_std, eps=eps)
