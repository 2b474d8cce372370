"""Log-ratios of two policies, and the clipped surrogate."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios. The square of exp(20) = 4.9e8 is still finite in float32."""


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Compute log(pi / pi_old) clamped to +-20, in the shape of its arguments.

    There is no gradient where the clamp acts.
    """
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Compute max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)), and a mask.

    The bool mask is true where the clipped term is larger. Both results have the shape of `ratio`.
    A ratio on a bound is not clipped and has its full gradient.
    """
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain, clipped), clipped > plain
