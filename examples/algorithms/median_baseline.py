"""The median of the group as the baseline, as an advantage estimator of your own.

    millrace check-algorithm examples/algorithms/median_baseline.py:median_baseline
    millrace train quickstart \
        algorithm.adv_estimator=examples/algorithms/median_baseline.py:median_baseline
"""

from __future__ import annotations

import torch

from millrace.algorithms.advantage import AdvantageBatch, AdvantageOptions, estimator


@estimator("median_baseline", group_relative=True)
def median_baseline(batch: AdvantageBatch, options: AdvantageOptions) -> torch.Tensor:
    """Return r_i - median_g for each trajectory, [N]."""
    outcomes = batch.outcomes()
    advantages = torch.empty_like(outcomes)
    for group in batch.groups.unique():
        at = batch.groups == group
        advantages[at] = outcomes[at] - outcomes[at].quantile(0.5)
    return advantages
