"""GSPO: PPO's clip on the ratio of a whole response."""

from __future__ import annotations

from millrace.algorithms.policy_loss import (
    LossInput,
    LossOptions,
    TokenLoss,
    clipped_surrogate,
    policy_loss,
)


@policy_loss(sequence_level=True, joins_tokens=True, by_sequence=True, stops_gradient=True)
def gspo(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Compute PPO's clip, without dual clip, on the sequence's ratio s.

    (GSPO-token, arXiv 2507.18071.)

    s     = exp(min(mean_t (log pi - log pi_old), 10))
    ratio = sg(s) pi / sg(pi): the value of s, with the gradient of the token's log-prob
    loss  = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))

    If all tokens of a sequence have one advantage, seq-mean-token-mean gives the value and gradient
    of GSPO. `LossInput.sequence_log_ratio` has the details. The log_ratio statistic is that of each
    token. For a dual clip, use `vanilla` with importance_sampling_level="sequence".
    """
    x = inputs.trained()
    loss, clipped = clipped_surrogate(x.sequence_log_ratio().exp(), x.advantages, options)
    return loss, x.statistics(log_ratio=x.log_ratio(), clipped=clipped)
