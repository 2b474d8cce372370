"""Log-prob and entropy of target tokens from hidden states, without the logits of all tokens at once.

d log p(y) / dz = onehot(y) - p        d H / dz = -p (log p + H)        z = hidden W^T / temperature
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KEEP_ELEMENTS = 1 << 22
"""Up to this many logits (16 MiB in float32) are kept for the backward pass; above, they are made again chunk by chunk."""
CHUNK_ELEMENTS = 1 << 26
"""Logits of one chunk: 256 MiB in float32."""


def log_probs_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, *, chunk: int = 0
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of p = softmax(hidden weight^T / temperature), each [N].

    hidden [N, H], weight [V, H] of the lm_head in the same dtype, targets [N] int64. Results are float32 (float64 for float64
    arguments), and so is everything between; both have gradients to hidden and weight. `chunk` is the number of rows at a
    time, 0 chooses. N = 0 gives empty results, connected to both arguments with a gradient of 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be over 0, got {temperature}")
    vocab = weight.shape[0]
    keep = chunk == 0 and hidden.shape[0] * vocab <= KEEP_ELEMENTS
    rows = max(hidden.shape[0], 1) if keep else chunk or max(CHUNK_ELEMENTS // vocab, 1)
    result: tuple[Tensor, Tensor] = _LogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, rows, keep
    )
    return result


@torch.no_grad()
def sum_of_squares(hidden: Tensor, weight: Tensor, temperature: float = 1.0) -> Tensor:
    """sum_v p_v^2 of p = softmax(hidden weight^T / temperature), [N], arguments and dtypes as above; no gradient."""
    sums = hidden.new_empty(hidden.shape[0], dtype=_compute_dtype(hidden))
    rows = max(CHUNK_ELEMENTS // weight.shape[0], 1)
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        sums[part] = _matmul(hidden[part], weight.t()).div_(temperature).softmax(-1).square_().sum(-1)
    return sums


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, rows: int, keep: bool
    ) -> tuple[Tensor, Tensor]:
        log_prob = hidden.new_empty(hidden.shape[0], dtype=_compute_dtype(hidden))
        entropy, log_norm = torch.empty_like(log_prob), torch.empty_like(log_prob)
        log_p = log_prob.new_empty(0)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            z = _matmul(hidden[part], weight.t()).div_(temperature)
            log_norm[part] = z.logsumexp(-1)
            log_p = z.sub_(log_norm[part].unsqueeze(-1))
            log_prob[part] = log_p.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1)
            # A logit of -inf has probability 0 and no share in the entropy: 0 * -inf would be nan.
            entropy[part] = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, log_norm, entropy, log_p if keep else None)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_norm, entropy, kept = ctx.saved_tensors
        grad_log_prob, grad_entropy = grads
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=log_norm.dtype)
        for start in range(0, hidden.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            log_p = kept
            if kept is None:
                log_p = _matmul(hidden[part], weight.t()).div_(ctx.temperature).sub_(log_norm[part].unsqueeze(-1))
            grad_z = _grad_logits(
                log_p,
                targets[part],
                entropy[part],
                None if grad_log_prob is None else grad_log_prob[part],
                None if grad_entropy is None else grad_entropy[part],
            )
            grad_z = grad_z.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad_z @ weight
            grad_weight += _matmul(grad_z.t(), hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _grad_logits(
    log_p: Tensor, targets: Tensor, entropy: Tensor, grad_log_prob: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """Gradient to the tempered logits [n, V], from the gradients to log-prob and entropy [n], where there are any."""
    p = log_p.exp()
    if grad_entropy is None:
        grad = p if grad_log_prob is None else p.mul_(-grad_log_prob.unsqueeze(-1))
        if grad_log_prob is None:
            return grad.zero_()
    else:
        inner = log_p.clamp(min=torch.finfo(log_p.dtype).min) + entropy.unsqueeze(-1)
        scale = inner.mul_(grad_entropy.unsqueeze(-1))
        if grad_log_prob is not None:
            scale += grad_log_prob.unsqueeze(-1)
        grad = p.mul_(scale.neg_())
    if grad_log_prob is not None:
        grad.scatter_add_(-1, targets.unsqueeze(-1), grad_log_prob.unsqueeze(-1))
    return grad


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a b with a result that was never rounded below float32: the tensor cores of a GPU add up in float32 anyway."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
