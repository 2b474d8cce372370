"""REINFORCE++, without and with a baseline of the group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.algorithms.advantage import AdvantageBatch, AdvantageOptions, estimator
from millrace.algorithms.estimators.grpo import grpo
from millrace.algorithms.returns import discounted_sums

if TYPE_CHECKING:
    from torch import Tensor


@estimator("reinforce_plus_plus", by_token=True, reads={"gamma", "whiten"})
def _reinforce_plus_plus(batch: AdvantageBatch, options: AdvantageOptions) -> Tensor:
    """Compute the reward to go with discount gamma, whitened over the trained tokens.

    There is no group baseline (REINFORCE++, arXiv 2501.03262).
    """
    to_go = discounted_sums(batch.rewards(), batch.lengths, options.gamma)
    return batch.whitened(to_go, options)


@estimator("reinforce_plus_plus_baseline", by_token=True, reads={"whiten"}, group_relative=True)
def _reinforce_plus_plus_baseline(batch: AdvantageBatch, options: AdvantageOptions) -> Tensor:
    """Give s_i - mean_g to each token, whitened over the trained tokens.

    (REINFORCE++ with baseline, arXiv 2501.03262.) A long response has more weight in the whitening.
    Groups of equal s_i, including groups of one, are exactly 0 before whitening and share one value
    after it. verl whitens the raw score of a group of one together with the differences of other
    groups.
    """
    centered = grpo(batch.outcomes(), batch.groups, norm_by_std=False, eps=options.eps)
    return batch.whitened(batch.each_token(centered), options)
