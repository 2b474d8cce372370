"""OPO: the baseline of least variance by length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.algorithms.advantage import AdvantageBatch, AdvantageOptions, estimator
from millrace.algorithms.groups import grouped

if TYPE_CHECKING:
    from torch import Tensor


def opo(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Compute r_i - sum_j L_j r_j / sum_j L_j over the group of i (OPO, arXiv 2505.23585).

    This baseline has the least variance if squared gradients are proportional to L. lengths [N] are
    the numbers L of trained tokens. A group without tokens has nothing to train and gets 0 (verl
    divides 0 by 0). A group of one gets 0, as the formula gives (verl omits the baseline).
    """
    g = grouped(rewards, groups)
    if lengths.shape != rewards.shape:
        raise ValueError(f"lengths {tuple(lengths.shape)} must be {tuple(rewards.shape)}")
    length = lengths.detach().double()
    total = g.each(g.groups.total(length))
    # Compute the shares first. If one trajectory has all tokens, its share is exactly 1, and its
    # advantage is exactly 0.
    baseline = g.each(g.groups.total(length / total.clamp(min=1) * g.rewards))
    return g.result((g.rewards - baseline).masked_fill(total == 0, 0.0))


@estimator("opo", group_relative=True)
def _opo(batch: AdvantageBatch, options: AdvantageOptions) -> Tensor:
    return opo(batch.outcomes(), batch.groups, batch.lengths)
