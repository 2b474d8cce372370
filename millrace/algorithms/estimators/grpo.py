"""GRPO and Dr.GRPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.algorithms.advantage import AdvantageBatch, AdvantageOptions, estimator
from millrace.algorithms.groups import grouped

if TYPE_CHECKING:
    from torch import Tensor


def grpo(rewards: Tensor, groups: Tensor, *, norm_by_std: bool, eps: float) -> Tensor:
    """Compute (r_i - mean_g) / (std_g + eps), with an unbiased std (GRPO, arXiv 2402.03300, eq. 4).

    `norm_by_std=False` omits the division (Dr.GRPO, arXiv 2503.20783).

    For a group of one, this function returns 0. verl returns the raw reward. That reinforces any
    response, at a scale that no other group has.
    """
    g = grouped(rewards, groups)
    centered = g.centered()
    return g.result(centered / (g.std() + eps) if norm_by_std else centered)


@estimator("grpo", reads={"norm_by_std", "eps"}, group_relative=True)
def _grpo(batch: AdvantageBatch, options: AdvantageOptions) -> Tensor:
    by_std, eps = options.norm_by_std, options.eps
    return grpo(batch.outcomes(), batch.groups, norm_by_std=by_std, eps=eps)
