"""The critic's loss for each token."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped value loss.

    loss = 0.5 max((v - R)^2, (clip(v, v_old - cliprange, v_old + cliprange) - R)^2)

    All tensors are [T] and of one floating dtype. Only `values` has a gradient: v - R, or 0 where
    the clipped term is larger. A value on a bound is not clipped. Aggregate the result with
    `token_weights`, like the policy's loss. Raises ValueError unless cliprange is over 0.

    Returns the token losses [T] and {"clipped": [T]}, which is 1 where the clipped term is larger.
    It is detached, in the dtype of `values`. T = 0 gives empty tensors. (Sources: OpenAI's PPO
    code, because arXiv 1707.06347 has no such clip; verl's compute_value_loss.)
    """
    if cliprange <= 0:
        raise ValueError(f"cliprange must be over 0, got {cliprange}")
    old, target = old_values.detach(), returns.detach()
    plain = (values - target).square()
    near = (values.clamp(old - cliprange, old + cliprange) - target).square()
    clipped = near > plain
    return 0.5 * torch.where(clipped, near, plain), {"clipped": clipped.to(values.dtype)}
