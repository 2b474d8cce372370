"""On-policy distillation: what a policy learns from the probabilities that a teacher gives.

k1 is the log-ratio of Thinking Machines' "On-Policy Distillation" (2025) and of verl's loss mode k1.
The divergences over a teacher's likeliest tokens are those of GKD (arXiv 2306.13649), with the other
tokens as one class, so that they are divergences between whole distributions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Signal = Callable[[Tensor, Tensor], Tensor]
"""(log-probs of the policy [M], those of a teacher [M]) -> advantages of the drawn tokens [M]."""


def k1(log_probs: Tensor, teacher: Tensor, *, limit: float = torch.inf) -> Tensor:
    """Return the advantage that a teacher gives each drawn token, [M], without a gradient.

    log_probs  [M] log p of the policy under training
    teacher    [M] log p of the teacher
    limit      the largest size of the result

    With the importance ratio as its factor, the mean of -k1 x grad log p is the gradient of
    KL(policy || teacher), token by token.
    """
    return (teacher - log_probs.detach()).clamp(-limit, limit)


def divergence(log_probs: Tensor, teacher: Tensor, *, forward: bool) -> Tensor:
    """Return KL(teacher || policy), or with `forward=False` KL(policy || teacher), [M].

    Both are [M, k] log-probs of the same k tokens. All other tokens count as one class. By the data
    processing inequality, the result is at most the KL of the whole distributions.
    """
    (p, p_rest), (_, q_rest) = (
        (x.exp(), _rest(x)) for x in ((teacher, log_probs) if forward else (log_probs, teacher))
    )
    log_p, log_q = (teacher, log_probs) if forward else (log_probs, teacher)
    # A token of probability 0 adds nothing: 0 x -inf would be NaN.
    inside = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
    return inside + p_rest * (p_rest.log() - q_rest.log())


def _rest(log_probs: Tensor) -> Tensor:
    """Return the probability of all other tokens, [M], above 0 by less than rounding errors."""
    rest = 1 - log_probs.exp().sum(-1)
    return rest.clamp(min=torch.finfo(log_probs.dtype).eps)
