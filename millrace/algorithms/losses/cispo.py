"""CISPO: a clipped weight, and a gradient for every token."""

from __future__ import annotations

from millrace.algorithms.policy_loss import LossInput, LossOptions, TokenLoss, policy_loss


@policy_loss(sequence_level=True, stops_gradient=True)
def cispo(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi.

    (CISPO, MiniMax-M1, arXiv 2506.13585.) The clip bounds a token's weight and never sets its
    gradient to 0. `clipped` marks weights that it changed where A is not 0. The paper has only an
    upper bound, which is clip_low = 1. With importance_sampling_level="sequence", rho is the
    sequence's ratio (TRL's key of that name; TRL has only the upper bound, and it bounds the ratio
    itself).
    """
    x = inputs.trained()
    ratio = x.log_ratio_at(options).detach().exp()
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    clipped = (weight != ratio) & (x.advantages != 0)
    stats = x.statistics(log_ratio=x.log_ratio(), clipped=clipped)
    return -weight * x.advantages * x.log_probs, stats
