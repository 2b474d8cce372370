"""Policy losses, token by token. Aggregation to one number is in aggregate.py."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this: exp(20) = 4.9e8 still leaves a finite square in float32."""


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """log(pi / pi_old) clamped to +-20, the shape of its arguments; no gradient where the clamp acts."""
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (arXiv 1707.06347) with clip-higher (DAPO, arXiv 2503.14476) and dual clip (arXiv 1912.09729).

    ratio = exp(clamp(log_probs - old_log_probs, +-20))
    loss  = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)); where A < 0 at most -A clip_c; times `weights`.

    All tensors [T] and of one floating dtype; only `log_probs` has a gradient. `weights` are importance weights of the
    rollout correction, constants. clip_c must be over 1.

    Returns the token losses [T] and detached statistics, each [T] in the dtype of `log_probs`:
    clipped        1 where the clip changed the loss (verl's pg_clipfrac is its mean)
    clipped_lower  1 where the dual clip did (A < 0 and ratio over clip_c)
    log_ratio      clamped log-ratio; -mean is verl's ppo_kl
    T = 0 gives empty tensors.
    """
    if clip_c <= 1:
        raise ValueError(f"clip_c must be over 1, got {clip_c}")
    old, adv = old_log_probs.detach(), advantages.detach()
    delta = log_ratio(log_probs, old)
    ratio = delta.exp()
    plain = -adv * ratio
    clipped = -adv * ratio.clamp(1 - clip_low, 1 + clip_high)
    pessimistic = torch.maximum(plain, clipped)
    bound = torch.where(adv < 0, -adv * clip_c, torch.inf)
    loss = torch.minimum(pessimistic, bound)
    if weights is not None:
        loss = loss * weights.detach()
    with torch.no_grad():
        stats = {
            "clipped": (clipped > plain).to(loss.dtype),
            "clipped_lower": (pessimistic > bound).to(loss.dtype),
            "log_ratio": delta.detach(),
        }
    return loss, stats
