"""Log-ratios of two policies, and the clipped surrogate."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.loss_input import LossInput, LossOptions
from millrace.algorithms.ragged import sequence_sums

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios. The square of exp(20) = 4.9e8 is still finite in float32."""

MAX_SEQUENCE_LOG_RATIO = 10.0
"""Upper bound of a sequence's mean log-ratio, as in verl's gspo. A small ratio needs no bound."""


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Compute log(pi / pi_old) clamped to +-20, in the shape of its arguments.

    There is no gradient where the clamp acts.
    """
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_means(values: Tensor, x: LossInput) -> Tensor:
    """Return means [num_sequences] over trained tokens, from values [M] that are 0 elsewhere.

    The sums are in float64.
    """
    total = sequence_sums(values.double(), x.sequence_ids, x.num_sequences)
    count = sequence_sums(x.mask.double(), x.sequence_ids, x.num_sequences)
    return (total / count.clamp(min=1)).to(values.dtype)


def sequence_log_ratio(x: LossInput) -> Tensor:
    """Return log s [M] of each token's sequence, with the gradient of the token's log-prob.

    (GSPO-token, arXiv 2507.18071.) `x` is the result of `LossInput.trained`.

    s = exp(min(mean_t (log pi - log pi_old), 10)); no gradient where the bound acts

    The log-ratios of tokens are not clamped, because that would bias the mean.
    """
    mean = sequence_means((x.log_probs - x.old_log_probs).detach(), x)[x.sequence_ids]
    # In this order, the difference is exactly 0 and the mean keeps its digits. A clip of 3e-4 needs
    # these digits.
    return (x.log_probs - x.log_probs.detach() + mean).clamp(max=MAX_SEQUENCE_LOG_RATIO)


def log_ratio_at_level(x: LossInput, options: LossOptions) -> Tensor:
    """Return the log of the ratio that the loss uses, [M]: the token's, or its sequence's."""
    if options.importance_sampling_level == "sequence":
        return sequence_log_ratio(x)
    return log_ratio(x.log_probs, x.old_log_probs)


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
