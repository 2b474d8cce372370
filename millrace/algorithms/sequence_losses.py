"""Policy losses with the ratio of a whole sequence.

Means are over the sequence's trained tokens. A sequence without trained tokens adds nothing. gspo
and geo_mean are designed for the aggregation seq-mean-token-mean, in which all sequences have equal
weight. They also work with any other aggregation. vespo is a sum over tokens.
"""

from __future__ import annotations

import torch

from millrace.algorithms.loss_input import LossInput, LossOptions, TokenLoss, statistics
from millrace.algorithms.ragged import sequence_sums
from millrace.algorithms.ratio import (
    MAX_LOG_RATIO,
    clipped_surrogate,
    log_ratio,
    sequence_log_ratio,
    sequence_means,
)


def gspo(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute PPO's clip, without dual clip, on the sequence's ratio s.

    (GSPO-token, arXiv 2507.18071.)

    s     = exp(min(mean_t (log pi - log pi_old), 10))
    ratio = sg(s) pi / sg(pi): the value of s, with the gradient of the token's log-prob
    loss  = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))

    If all tokens of a sequence have one advantage, seq-mean-token-mean gives the value and gradient
    of GSPO. `sequence_log_ratio` has the details. The log_ratio statistic is that of each token.
    For a dual clip, use `vanilla` with importance_sampling_level="sequence".
    """
    x = inputs.trained()
    loss, clipped = clipped_surrogate(
        sequence_log_ratio(x).exp(), x.advantages, options.clip_low, options.clip_high
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
    advantages = sequence_means(x.advantages, x)
    adv = advantages[x.sequence_ids]
    delta = log_ratio(x.log_probs, x.old_log_probs)
    bounded = torch.where(
        adv > 0, delta.clamp(max=options.clip_high), delta.clamp(min=-options.clip_low)
    )
    loss = -advantages * sequence_means(bounded, x).exp()
    clipped = torch.where(
        adv > 0, delta > options.clip_high, (delta < -options.clip_low) & (adv < 0)
    )
    stats = statistics(x.log_probs, log_ratio=delta, clipped=clipped)
    return loss[x.sequence_ids].masked_fill(~x.mask, 0.0), stats


def vespo(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute -sg(phi(W)) A log pi, phi(W) = e^lambda W^k e^(-lambda W).

    (VESPO, arXiv 2602.10693, section 3.4, where k is c_1 and lambda is c_2.)

    W         = exp(clamp(sum_t (log pi - log pi_old), +-20)): the product of the sequence's ratios
    k, lambda = vespo_k_pos, vespo_lambda_pos where A > 0, else vespo_k_neg, vespo_lambda_neg

    phi is 1 at W = 1, largest at W = k / lambda, and fades to 0 on both sides (below, if k > 0). It
    has no gradient. The `clipped` statistics are 0.

    TRL has these keys and its own bounds: the log-ratio of each token is clamped to +-20, log W to
    -18.4 to 20, and lambda is at least 1e-4. Here, only log W is clamped, so a long sequence has
    the product of its ratios. TRL multiplies importance weights into W. Here they multiply the
    loss, as in every other mode. For the paper's W, current / rollout, let old_log_probs be those
    of the rollout.
    """
    x = inputs.trained()
    far = (x.log_probs - x.old_log_probs).detach().double()
    log_w = sequence_sums(far, x.sequence_ids, x.num_sequences)
    log_w = log_w.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[x.sequence_ids]
    rises = x.advantages > 0
    k, decay = (
        torch.where(rises, log_w.new_full((), positive), log_w.new_full((), other))
        for positive, other in (
            (options.vespo_k_pos, options.vespo_k_neg),
            (options.vespo_lambda_pos, options.vespo_lambda_neg),
        )
    )
    phi = (k * log_w - decay * log_w.expm1()).exp().to(x.log_probs.dtype)
    return -phi * x.advantages * x.log_probs, statistics(
        x.log_probs, log_ratio=log_ratio(x.log_probs, x.old_log_probs)
    )
