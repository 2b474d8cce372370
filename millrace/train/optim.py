"""AdamW, its learning rate and gradient clipping, for plain modules and for FSDP2's modules."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from millrace.config import OptimConfig


def lr_at(optim: OptimConfig, horizon: int, step: int) -> float:
    """Return the learning rate of optimizer step `step`, from 0, in a run of `horizon` steps.

    With w = optim.warmup_steps(horizon), x = (step - w) / (horizon - w), at most 1, and
    m = min_lr_ratio:

    warm-up   lr * (step + 1) / w
    constant  lr
    linear    lr * (m + (1 - m) (1 - x))
    cosine    lr * (m + (1 - m) (1 + cos(pi x)) / 2)

    The first step of a warm-up has a rate above 0.
    """
    warmup, m = optim.warmup_steps(horizon), optim.min_lr_ratio
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    x = min((step - warmup) / max(horizon - warmup, 1), 1.0)
    if optim.lr_scheduler_type == "linear":
        return optim.lr * (m + (1 - m) * (1 - x))
    if optim.lr_scheduler_type == "cosine":
        return optim.lr * (m + (1 - m) * (1 + math.cos(math.pi * x)) / 2)
    return optim.lr


def adamw(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    """Build an AdamW. Weight decay acts on matrices, not on norms and biases."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [[p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]]
    # fused: one kernel for all tensors. On a CPU, a tiny model takes a third of foreach's time.
    made = torch.optim.AdamW([{"params": g} for g in groups if g], lr=optim.lr, fused=True)
    apply_settings(made, optim)
    return made


def apply_settings(optimizer: torch.optim.AdamW, optim: OptimConfig) -> None:
    """Set weight decay, betas and epsilon. A loaded state has those of the run that saved it."""
    for group in optimizer.param_groups:
        matrices = any(p.ndim >= 2 for p in group["params"])
        if "momentum" in group:
            group["momentum"] = optim.muon_momentum
        group["weight_decay"] = optim.weight_decay if matrices else 0.0
        group["betas"], group["eps"] = optim.betas, optim.eps


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of the parameters that have one."""
    return [p.grad for p in parameters if p.grad is not None]


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """Return the 2-norm of the whole gradient as a plain scalar, the same on every rank.

    With sharded gradients this is a collective.
    """
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_(gradients: list[Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients of norm `norm` down to `max_norm`, in place. 0 means no limit."""
    if max_norm > 0 and norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / norm)
