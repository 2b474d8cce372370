"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    cliprange: float,
    huber_delta: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped value loss, with squared errors or with Huber's.

    loss = max(h(v - R), h(clip(v, v_old - cliprange, v_old + cliprange) - R))
    h(x) = x^2 / 2 where huber_delta is None or abs(x) <= huber_delta
    h(x) = huber_delta (abs(x) - huber_delta / 2) elsewhere

    All tensors are [T] and of one floating dtype. Only `values` has a gradient: v - R, bounded by
    +-huber_delta, or 0 where the clipped term is larger. A value on a bound is not clipped.
    Aggregate the result with `token_weights`, like the policy's loss. Raises ValueError unless
    cliprange and huber_delta are over 0.

    Returns the token losses [T] and {"clipped": [T]}, which is 1 where the clipped term is larger.
    It is detached, in the dtype of `values`. T = 0 gives empty tensors. (Sources: OpenAI's PPO
    code, because arXiv 1707.06347 has no such clip; verl's compute_value_loss, which has squared
    errors alone; AReaL's ppo_critic_loss_fn with loss_fn_type="huber", whose delta is always 10.)
    """
    if cliprange <= 0:
        raise ValueError(f"cliprange must be over 0, got {cliprange}")
    if huber_delta is not None and huber_delta <= 0:
        raise ValueError(f"huber_delta must be over 0, got {huber_delta}")
    old, target = old_values.detach(), returns.detach()
    plain = _double_huber(values - target, huber_delta)
    near = _double_huber(values.clamp(old - cliprange, old + cliprange) - target, huber_delta)
    clipped = near > plain
    return 0.5 * torch.where(clipped, near, plain), {"clipped": clipped.to(values.dtype)}


def _double_huber(error: Tensor, delta: float | None) -> Tensor:
    """Return 2 h(error)."""
    if delta is None:
        return error.square()
    size = error.abs()
    return torch.where(size <= delta, error.square(), delta * (2 * size - delta))
