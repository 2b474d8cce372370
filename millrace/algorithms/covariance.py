"""Which tokens clip_cov and kl_cov act on: those whose log-prob and advantage vary together (arXiv 2505.22617).

cov_t = (A_t - mean A) (log pi_t - mean log pi), both means over all trained tokens. Such tokens are what makes entropy fall.

Give the WHOLE mini-batch, of all ranks: the choice is a share of its tokens. verl takes means, share and draw from each
micro-batch, so that at 2e-4 every micro-batch of up to 9,999 tokens gives one token, whatever its covariance is in the
mini-batch; and it draws from an unseeded permutation, so that ranks disagree and runs cannot be repeated. log_probs are those of
the policy under training; at the first step on a batch the old ones are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor


def covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """cov_t, [T] float64, detached; not a number where mask is false. log_probs and advantages [T] floating, mask [T] bool."""
    result = log_probs.new_full(log_probs.shape, torch.nan, dtype=torch.float64)
    a, logp = (x.detach()[mask].double() for x in (advantages, log_probs))
    result[mask] = (a - a.mean()) * (logp - logp.mean())
    return result


def kl_cov_tokens(log_probs: Tensor, advantages: Tensor, mask: Tensor, *, ratio: float) -> Tensor:
    """The max(int(ratio * trained tokens), 1) trained tokens of largest covariance, as a mask [T] bool.

    Of equal ones the first in the batch win. No trained tokens give none. Raises ValueError unless 0 < ratio <= 1.
    """
    cov = covariances(log_probs, advantages, mask)
    at = mask.nonzero().squeeze(-1)
    order = cov[at].argsort(descending=True, stable=True)
    return _marked(mask, at[order[: _count(ratio, len(at))]])


def clip_cov_tokens(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio: float,
    lower: float,
    upper: float,
    generator: torch.Generator,
    clipped: Tensor | None = None,
) -> Tensor:
    """max(int(ratio * trained tokens), 1) tokens drawn from those with lower < cov < upper, or all if fewer; a mask [T] bool.

    `clipped` [T] bool: tokens that PPO's clip leaves without a gradient, never drawn (verl's choice); there are none while
    log_probs are the old ones. The draw depends on the generator's state alone: a generator of the same seed on each rank gives
    each the same tokens. Raises ValueError unless 0 < ratio <= 1 and lower < upper.
    """
    if not lower < upper:
        raise ValueError(f"lower must be below upper, got {lower} and {upper}")
    cov = covariances(log_probs, advantages, mask)
    candidate = (cov > lower) & (cov < upper)
    if clipped is not None:
        candidate &= ~clipped
    at = candidate.nonzero().squeeze(-1)
    count = _count(ratio, int(mask.sum()))
    drawn = torch.randperm(len(at), generator=generator, device=generator.device)[:count]
    return _marked(mask, at[drawn.to(at.device)])


def _count(ratio: float, tokens: int) -> int:
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be over 0 and at most 1, got {ratio}")
    return max(int(ratio * tokens), 1)


def _marked(mask: Tensor, positions: Tensor) -> Tensor:
    return torch.zeros_like(mask, dtype=torch.bool).index_fill(0, positions, True)
