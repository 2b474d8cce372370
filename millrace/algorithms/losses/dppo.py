"""DPPO: no gradient for tokens whose probability has moved too far (arXiv 2602.04879).

kept token   -A sg(min(rho, dppo_clip_c)) log pi
other token  0

dppo_tv and dppo_kl differ in the rule for kept tokens. Each rule bounds a divergence, not a ratio. The
divergence is between two outcomes: the sampled token, and all other tokens together. A token that
moves back towards the old policy is always kept. verl's runs use 0.15 for TV and 0.05 for KL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from millrace.algorithms.policy_loss import (
    LossInput,
    LossOptions,
    TokenLoss,
    log_ratio,
    policy_loss,
)

if TYPE_CHECKING:
    from torch import Tensor


class DppoOptions(LossOptions):
    dppo_clip_c: float = Field(20.0, gt=1)
    """dppo_tv, dppo_kl: upper bound on the ratio that weights a token.

    verl intends 20, but its clip_ratio_c = 3 always overrides that.
    """


TINY = 1e-8
"""Lower bound of the total probability of the other tokens.

In float32, a nearly certain token has log-prob 0. Without this bound, the KL would be infinite.
"""


@policy_loss(options=DppoOptions, stops_gradient=True)
def dppo_tv(inputs: LossInput, options: DppoOptions) -> TokenLoss:
    """Keep p - p_old <= clip_high if A > 0, p - p_old >= -clip_low if A < 0.

    The divergence is the binary total variation. Bounds are inclusive.
    """
    x = inputs.trained()
    shift = x.log_probs.detach().exp() - x.old_log_probs.exp()
    return _kept_gradient(
        x,
        (shift <= options.clip_high).where(x.advantages > 0, shift >= -options.clip_low),
        options,
    )


@policy_loss(options=DppoOptions, stops_gradient=True)
def dppo_kl(inputs: LossInput, options: DppoOptions) -> TokenLoss:
    """Keep KL(p_old, p) <= clip_high if A > 0, <= clip_low if A < 0, or a token that moves back.

    The divergence is the binary KL. Bounds are inclusive.
    """
    x = inputs.trained()
    new, old = x.log_probs.detach(), x.old_log_probs
    kl = binary_kl(old, new)
    rises = (kl <= options.clip_high) | (new <= old)
    falls = (kl <= options.clip_low) | (new >= old)
    return _kept_gradient(x, rises.where(x.advantages > 0, falls), options)


def binary_kl(old_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """Compute p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)).

    log(p_old / p) is clamped to +-20. 1 - p and 1 - p_old are at least 1e-8. The result has the
    shape and dtype of the arguments. This function preserves the digits of a small 1 - p. verl
    computes 1 - exp(log p) + 1e-8, which does not.
    """
    rest_old, rest = ((-x.expm1()).clamp(min=TINY) for x in (old_log_probs, log_probs))
    return rest_old * (rest_old.log() - rest.log()) - old_log_probs.exp() * log_ratio(
        log_probs, old_log_probs
    )


def _kept_gradient(x: LossInput, kept: Tensor, options: DppoOptions) -> TokenLoss:
    delta = x.log_ratio().detach()
    ratio, pushed = delta.exp(), x.advantages != 0
    weight = ratio.clamp(max=options.dppo_clip_c).where(kept, 0.0)
    truncated = kept & pushed & (ratio > options.dppo_clip_c)
    stats = x.statistics(log_ratio=delta, clipped=~kept & pushed, clipped_lower=truncated)
    return -x.advantages * weight * x.log_probs, stats
