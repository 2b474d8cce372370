"""The selection of tokens by their entropy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SLACK = 1e-9
"""Slack of a position among sorted tokens, for the rounding of 1 - share."""


def high_entropy(entropies: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """Mark the trained tokens with the largest entropies, [T] bool.

    (Forking tokens, arXiv 2506.01939; TRL's `top_entropy_quantile`.) A token is marked if its
    entropy is at least the (1 - share) quantile of the trained tokens, interpolated linearly. Equal
    entropies are marked together, so the marked share may be larger. share = 1 marks all.

    entropies [T] floating are of the policy under training, and mask [T] bool marks the trained
    tokens. Pass the WHOLE mini-batch, of all ranks, because the quantile is over its tokens. TRL
    takes it over one micro-batch of all ranks. Multiply the policy's token losses by the result:
    other tokens have no policy gradient and still count in denominators, as in the paper. That holds
    only if the loss of a token has no gradient to other tokens: not for the modes in `modes.JOINT`.

    Raises ValueError unless 0 < share <= 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be over 0 and at most 1, got {share}")
    if not bool(mask.any()):
        return torch.zeros_like(mask)
    ordered = entropies.detach()[mask].sort().values
    # No entropy is between the interpolated quantile and the next token above it.
    first = math.ceil((1 - share) * (len(ordered) - 1) - SLACK)
    return mask & (entropies.detach() >= ordered[first])
