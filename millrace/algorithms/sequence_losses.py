"""Policy losses with the ratio of a whole sequence.

Means are over the sequence's trained tokens. A sequence without trained tokens adds nothing. Both
losses are designed for the aggregation seq-mean-token-mean, in which all sequences have equal
weight. Both also work with any other aggregation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.loss_input import LossInput, LossOptions, TokenLoss, statistics
from millrace.algorithms.ragged import sequence_sums
from millrace.algorithms.ratio import clipped_surrogate, log_ratio

MAX_SEQUENCE_LOG_RATIO = 10.0
"""Upper bound of gspo's mean log-ratio, as in verl. A small ratio needs no bound."""


def gspo(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute PPO's clip, without dual clip, on the sequence's ratio s.

    (GSPO-token, arXiv 2507.18071.)

    s     = exp(min(mean_t (log pi - log pi_old), 10)); no gradient where the bound acts
    ratio = sg(s) pi / sg(pi): the value of s, with the gradient of the token's log-prob
    loss  = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))

    If all tokens of a sequence have one advantage, seq-mean-token-mean gives the value and gradient
    of GSPO. The log-ratios of tokens are not clamped, because that would bias the mean. The
    log_ratio statistic is that of each token.
    """
    x = inputs.trained()
    mean = _sequence_means((x.log_probs - x.old_log_probs).detach(), x)[x.sequence_ids]
    # In this order, the difference is exactly 0 and the mean keeps its digits. A clip of 3e-4 needs
    # these digits.
    log_s = (x.log_probs - x.log_probs.detach() + mean).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    loss, clipped = clipped_surrogate(
        log_s.exp(), x.advantages, options.clip_low, options.clip_high
    )
    return loss, statistics(
        x.log_probs, log_ratio=log_ratio(x.log_probs, x.old_log_probs), clipped=clipped
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
    advantages = _sequence_means(x.advantages, x)
    adv = advantages[x.sequence_ids]
    delta = log_ratio(x.log_probs, x.old_log_probs)
    bounded = torch.where(
        adv > 0, delta.clamp(max=options.clip_high), delta.clamp(min=-options.clip_low)
    )
    loss = -advantages * _sequence_means(bounded, x).exp()
    clipped = torch.where(
        adv > 0, delta > options.clip_high, (delta < -options.clip_low) & (adv < 0)
    )
    stats = statistics(x.log_probs, log_ratio=delta, clipped=clipped)
    return loss[x.sequence_ids].masked_fill(~x.mask, 0.0), stats


def _sequence_means(values: Tensor, x: LossInput) -> Tensor:
    """Return means [num_sequences] over trained tokens, from values [M] that are 0 elsewhere.

    The sums are in float64.
    """
    total = sequence_sums(values.double(), x.sequence_ids, x.num_sequences)
    count = sequence_sums(x.mask.double(), x.sequence_ids, x.num_sequences)
    return (total / count.clamp(min=1)).to(values.dtype)
