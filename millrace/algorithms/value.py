"""The critic's loss, token by token."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """0.5 max((v - R)^2, (clip(v, v_old - cliprange, v_old + cliprange) - R)^2): PPO's clipped value loss.

    All [T] and of one floating dtype; only `values` has a gradient: v - R, or 0 where the clipped side is larger. A value on
    an edge is inside. Aggregate with aggregate.py, as the policy's loss. Raises ValueError unless cliprange is over 0.

    Returns the token losses [T] and {"clipped": [T], 1 where the clipped side is larger}, detached, in the dtype of `values`.
    T = 0 gives empty tensors. (The clip is from OpenAI's PPO code, not from arXiv 1707.06347; verl's compute_value_loss.)
    """
    if cliprange <= 0:
        raise ValueError(f"cliprange must be over 0, got {cliprange}")
    old, target = old_values.detach(), returns.detach()
    plain = (values - target).square()
    near = (values.clamp(old - cliprange, old + cliprange) - target).square()
    clipped = near > plain
    return 0.5 * torch.where(clipped, near, plain), {"clipped": clipped.to(values.dtype)}
