"""DPPO: the policy gradient without tokens whose probability has moved too far (arXiv 2602.04879).

Both modes have this loss, with rho = exp(clamp(log pi - log pi_old, +-20)):

kept token   -A sg(min(rho, dppo_clip_c)) log pi
other token  0

The modes differ in the rule for kept tokens. Each rule bounds a divergence, not a ratio. The
divergence is between two outcomes: the sampled token, and all other tokens together. A token that
moves back towards the old policy is always kept. verl's runs use 0.15 for TV and 0.05 for KL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.loss_input import LossInput, LossOptions, TokenLoss, statistics
from millrace.algorithms.ratio import log_ratio

TINY = 1e-8
"""Lower bound of the total probability of the other tokens.

In float32, a nearly certain token has log-prob 0. Without this bound, the KL would be infinite.
"""


def dppo_tv(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Keep p - p_old <= clip_high if A > 0, p - p_old >= -clip_low if A < 0.

    The divergence is the binary total variation. Bounds are inclusive.
    """
    x = inputs.trained()
    shift = x.log_probs.detach().exp() - x.old_log_probs.exp()
    return _kept_gradient(
        x,
        torch.where(x.advantages > 0, shift <= options.clip_high, shift >= -options.clip_low),
        options,
    )


def dppo_kl(inputs: LossInput, options: LossOptions) -> TokenLoss:
    """Keep KL(p_old, p) <= clip_high if A > 0, <= clip_low if A < 0, or a token that moves back.

    The divergence is the binary KL. Bounds are inclusive.
    """
    x = inputs.trained()
    new, old = x.log_probs.detach(), x.old_log_probs
    kl = binary_kl(old, new)
    rises = (kl <= options.clip_high) | (new <= old)
    falls = (kl <= options.clip_low) | (new >= old)
    return _kept_gradient(x, torch.where(x.advantages > 0, rises, falls), options)


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


def _kept_gradient(x: LossInput, kept: Tensor, options: LossOptions) -> TokenLoss:
    delta = log_ratio(x.log_probs, x.old_log_probs).detach()
    ratio = delta.exp()
    weight = torch.where(kept, ratio.clamp(max=options.dppo_clip_c), 0.0)
    pushed = x.advantages != 0
    truncated = kept & pushed & (ratio > options.dppo_clip_c)
    stats = statistics(
        x.log_probs, log_ratio=delta, clipped=~kept & pushed, clipped_lower=truncated
    )
    return -x.advantages * weight * x.log_probs, stats
