"""VESPO: a smooth weight of a response by the product of its ratios."""

from __future__ import annotations

from pydantic import Field

from millrace.algorithms.policy_loss import (
    MAX_LOG_RATIO,
    LossInput,
    LossOptions,
    TokenLoss,
    policy_loss,
)
from millrace.algorithms.ragged import sequence_sums


class VespoOptions(LossOptions):
    vespo_k_pos: float = Field(2.0, ge=0)
    """vespo: exponent of the response's ratio for positive advantages."""
    vespo_lambda_pos: float = Field(3.0, gt=0)
    """vespo: decay by the response's ratio for positive advantages."""
    vespo_k_neg: float = Field(3.0, ge=0)
    """vespo: exponent of the response's ratio for zero and negative advantages."""
    vespo_lambda_neg: float = Field(2.0, gt=0)
    """vespo: decay by the response's ratio for zero and negative advantages."""


@policy_loss(options=VespoOptions, joins_tokens=True, stops_gradient=True)
def vespo(inputs: LossInput, options: VespoOptions) -> TokenLoss:
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
    k, decay = (
        log_w.new_full(log_w.shape, positive).where(x.advantages > 0, other)
        for positive, other in (
            (options.vespo_k_pos, options.vespo_k_neg),
            (options.vespo_lambda_pos, options.vespo_lambda_neg),
        )
    )
    phi = (k * log_w - decay * log_w.expm1()).exp().to(x.log_probs.dtype)
    return -phi * x.advantages * x.log_probs, x.statistics(log_ratio=x.log_ratio())
