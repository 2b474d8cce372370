"""RLOO: the mean of the others as the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.algorithms.advantage import AdvantageBatch, AdvantageOptions, estimator
from millrace.algorithms.groups import grouped

if TYPE_CHECKING:
    from torch import Tensor


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Compute r_i minus the mean of the other rewards of its group (RLOO, arXiv 2402.14740).

    This equals n / (n - 1) (r_i - mean_g). A group of one has no other rewards and gets 0, as in
    verl's `rloo_vectorized`. For such a group, verl's `rloo` returns the raw reward.
    """
    g = grouped(rewards, groups)
    n = g.groups.size.double()
    return g.result(g.each(n / (n - 1).clamp(min=1)) * g.centered())


@estimator("rloo", group_relative=True)
def _rloo(batch: AdvantageBatch, options: AdvantageOptions) -> Tensor:
    return rloo(batch.outcomes(), batch.groups)
