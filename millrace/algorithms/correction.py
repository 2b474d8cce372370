"""Importance weights between the policy that drew the tokens (b) and the one that trains on them (a).

Weights are constants (detached) and multiply token losses; bounds are on the ratio r = pi_a / pi_b itself: lo <= r <= hi.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.losses import log_ratio


def token_ratios(log_probs_a: Tensor, log_probs_b: Tensor) -> Tensor:
    """r_t = exp(clamp(log a - log b, +-20)), [T] in the dtype of the arguments, detached."""
    return log_ratio(log_probs_a.detach(), log_probs_b.detach()).exp()


def sequence_ratios(log_probs_a: Tensor, log_probs_b: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """r_i = exp(clamp(sum_t (log a - log b), +-20)) over the tokens of sequence i, [num_sequences], detached.

    log_probs [T] of trained tokens, sequence_ids [T] integers below num_sequences. A sequence without tokens has ratio 1.
    Index the result with sequence_ids for a weight of each token.
    """
    delta = (log_probs_a - log_probs_b).detach()
    total = delta.new_zeros(num_sequences).index_add_(0, sequence_ids, delta)
    return log_ratio(total, torch.zeros_like(total)).exp()


def truncate(ratios: Tensor, upper: float) -> Tensor:
    """min(r, upper): truncated importance sampling (TIS). Shape and dtype of `ratios`. upper must be over 0."""
    if upper <= 0:
        raise ValueError(f"upper must be over 0, got {upper}")
    return ratios.clamp(max=upper)


def band(ratios: Tensor, lower: float, upper: float) -> tuple[Tensor, Tensor]:
    """r where lower <= r <= upper, else 0 (IcePop, arXiv 2510.18855), and the bool mask of what is kept; shapes of `ratios`.

    A ratio that is not a number is outside. Bounds are of the ratio itself, 0 <= lower <= upper: not of its inverse, as in
    verl's rejection by k1, where a band that is not reciprocal keeps the wrong tokens.
    """
    if not 0 <= lower <= upper:
        raise ValueError(f"a band needs 0 <= lower <= upper, got {lower} and {upper}")
    kept = (ratios >= lower) & (ratios <= upper)
    return torch.where(kept, ratios, 0.0), kept


def effective_sample_size(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """(sum w)^2 / (n sum w^2): a share from 1/n (one weight has all) to 1 (all equal), scalar in float64.

    `mask` [T]: only weights where it is not 0 count. No weights, or all of them 0, give 0.
    """
    w = weights.detach().double()
    if mask is not None:
        w = w[mask != 0]
    squares = w.square().sum() * w.numel()
    return torch.where(squares > 0, w.sum().square() / squares.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
