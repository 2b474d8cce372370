"""Muon: AdamW whose steps on the matrices of the layers are orthogonal (Jordan et al., 2024).

With M = momentum x M + (1 - momentum) x G and N = (1 - momentum) x G + momentum x M, a matrix W
becomes (1 - lr x weight_decay) x W - 0.2 sqrt(max(rows, columns)) x lr x orthogonal(N). The factor
gives a step the rms of AdamW's, so a learning rate of AdamW fits (Moonlight, arXiv 2502.16982).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from millrace.config import OptimConfig
from millrace.train.optim import adamw, apply_settings

BUFFER = "momentum_buffer"
_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


class Muon(torch.optim.AdamW):
    """Steps the groups with `momentum` by Muon, and the others by AdamW."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"] if "momentum" in group else ():
                if p.grad is not None:
                    self._step_matrix(p, p.grad, group)
                    p.grad = None  # AdamW leaves it alone
        return super().step(closure)

    def _step_matrix(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        momentum, lr = group["momentum"], float(group["lr"])
        buffer = self.state[p].setdefault(BUFFER, torch.zeros_like(p))
        buffer.lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(buffer, momentum)
        # Every rank needs the whole matrix, and keeps its rows of the result.
        whole = direction.full_tensor() if isinstance(direction, DTensor) else direction
        update: Tensor = orthogonal(whole).to(p.dtype)
        if isinstance(p, DTensor):
            update = distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None)
        p.mul_(1 - lr * group["weight_decay"])
        p.add_(update, alpha=-lr * 0.2 * max(whole.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about U V^T of matrix = U S V^T, in bfloat16, by a quintic Newton-Schulz iteration.

    Its singular values are between 0.7 and 1.2.
    """
    a, b, c = _COEFFICIENTS
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def make_optimizer(
    parameters: Iterable[nn.Parameter], layers: Iterable[nn.Module], optim: OptimConfig
) -> torch.optim.AdamW:
    """Return the optimizer that `optim` names, for parameters of which some are in `layers`."""
    if optim.optimizer == "adamw":
        return adamw(parameters, optim)
    inside = {p for layer in layers for p in layer.parameters() if p.ndim == 2}
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        [p for p in trained if p in inside],
        [p for p in trained if p not in inside and p.ndim >= 2],
        [p for p in trained if p.ndim < 2],
    ]
    muon: dict[str, Any] = {"params": groups[0], "momentum": optim.muon_momentum}
    rest: list[dict[str, Any]] = [{"params": g} for g in groups[1:]]
    made = Muon([g for g in (muon, *rest) if g["params"]], lr=optim.lr, fused=True)
    apply_settings(made, optim)
    return made


def empty_state(optimizer: torch.optim.AdamW, p: nn.Parameter) -> dict[str, Tensor]:
    """Return the state of a parameter that has not stepped."""
    if any(
        "momentum" in group and any(q is p for q in group["params"])
        for group in optimizer.param_groups
    ):
        return {BUFFER: torch.zeros_like(p)}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=p.device),
        "exp_avg": torch.zeros_like(p),
        "exp_avg_sq": torch.zeros_like(p),
    }
