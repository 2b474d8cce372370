"""GMPO: the geometric mean of a response's ratios."""

from __future__ import annotations

from millrace.algorithms.policy_loss import LossInput, LossOptions, TokenLoss, policy_loss


@policy_loss(
    joins_tokens=True,
    by_sequence=True,
    joint="gives every token of a response a gradient through one ratio",
)
def geo_mean(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute -A exp(mean_t d) for each trained token of the sequence (GMPO, arXiv 2507.20673).

    d = min(log rho, clip_high) if A > 0, with log rho clamped to +-20
    d = max(log rho, -clip_low) if A < 0, with log rho clamped to +-20
    A = the mean of the sequence's advantages (the paper has one for all its tokens)

    The clip acts on each token's log-ratio and is pessimistic. A value on a bound is not clipped.
    `clipped` marks only tokens that the clip changed, for either sign of A. (verl also counts
    tokens beyond the opposite bound, which the clip leaves unchanged.)

    Every token has the sequence's loss. seq-mean-token-mean then gives the paper's mean over
    sequences, for any split of the mini-batch. verl takes a plain mean over the micro-batch for
    every aggregation mode, so its result depends on the split into micro-batches and ranks.
    Importance weights act here as their mean over the sequence, and in verl as their geometric
    mean.
    """
    x = inputs.trained()
    advantages = x.sequence_means(x.advantages)
    adv, delta = advantages[x.sequence_ids], x.log_ratio()
    bounded = delta.clamp(max=options.clip_high).where(adv > 0, delta.clamp(min=-options.clip_low))
    loss = -advantages * x.sequence_means(bounded).exp()
    clipped = (delta > options.clip_high).where(adv > 0, (delta < -options.clip_low) & (adv < 0))
    stats = x.statistics(log_ratio=delta, clipped=clipped)
    return loss[x.sequence_ids].masked_fill(~x.mask, 0.0), stats
