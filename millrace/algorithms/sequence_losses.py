"""Policy losses whose ratio is that of a whole sequence. Means are over its trained tokens; one without any adds nothing.

Both are meant for seq-mean-token-mean, with which every sequence weighs the same; each works with any other mode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.loss_input import LossInput, LossOptions, TokenLoss, statistics
from millrace.algorithms.losses import clipped_surrogate, log_ratio
from millrace.algorithms.ragged import sequence_sums

MAX_SEQUENCE_LOG_RATIO = 10.0
"""gspo's bound above on a mean of log-ratios, as in verl; a ratio that is small needs none."""


def gspo(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """PPO's clip, without dual clip, on the sequence's ratio s (GSPO-token, arXiv 2507.18071).

    s     = exp(min(mean_t (log pi - log pi_old), 10)); no gradient where the bound acts
    ratio = sg(s) pi / sg(pi): of the value of s, with the gradient of the token's own log-prob
    loss  = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))

    If all tokens of a sequence have one advantage, seq-mean-token-mean gives value and gradient of GSPO. Log-ratios are not
    clamped one by one: that would bias the mean. The log_ratio statistic is of tokens.
    """
    x = inputs.trained()
    mean = _sequence_means((x.log_probs - x.old_log_probs).detach(), x)[x.sequence_ids]
    # In this order the difference is exactly 0 and keeps the digits of the mean: clips of 3e-4 need them.
    log_s = (x.log_probs - x.log_probs.detach() + mean).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    loss, clipped = clipped_surrogate(
        log_s.exp(), x.advantages, options.clip_low, options.clip_high
    )
    return loss, statistics(
        x.log_probs, log_ratio=log_ratio(x.log_probs, x.old_log_probs), clipped=clipped
    )


def geo_mean(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """-A exp(mean_t d), given to each trained token of the sequence (GMPO, arXiv 2507.20673).

    d = min(log rho, clip_high) if A > 0, max(log rho, -clip_low) if A < 0; log rho clamped to +-20 first
    A = mean of the sequence's advantages (the paper has one for all its tokens)

    The clip is token by token, on the log-ratio, pessimistic; an edge is inside. `clipped` marks tokens that it changed, of
    either sign of A, and only those (verl also counts tokens beyond the other edge, which it leaves as they are).

    As every token carries the sequence's loss, seq-mean-token-mean gives the paper's mean over sequences however the
    mini-batch is cut. verl takes a plain mean over the micro-batch, whatever the aggregation mode, so that its result depends
    on how micro-batches and ranks are cut. Importance weights act as their mean over the sequence there; verl's are a
    geometric mean.
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
    """Means [num_sequences] over trained tokens of values [M] that are 0 elsewhere; added up in float64."""
    total = sequence_sums(values.double(), x.sequence_ids, x.num_sequences)
    count = sequence_sums(x.mask.double(), x.sequence_ids, x.num_sequences)
    return (total / count.clamp(min=1)).to(values.dtype)
