"""Log-prob and entropy of target tokens from hidden states, in chunks of logits.

d log p(y) / dz = onehot(y) - p        d H / dz = -p (log p + H)        z = hidden W^T / temperature

Ranks may share the vocabulary: each has some rows of the lm_head. Sums over the vocabulary are then
sums over ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KEEP_ELEMENTS = 1 << 22
"""Up to this number of logits (16 MiB in float32), the backward pass reuses them.

With more logits, the backward pass computes them again, chunk by chunk.
"""
CHUNK_ELEMENTS = {"cpu": 1 << 26, "cuda": 1 << 27}
"""Number of logits in one chunk: 256 MiB in float32 on a CPU, 512 MiB on a GPU.

The GPU's chunk is larger, because a GPU multiplies matrices of few rows slowly.
"""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The rows of an lm_head that this rank of a group has: from `first`, without padded ones."""

    group: dist.ProcessGroup
    first: int
    rows: int
    padded: int
    """The rows with padding, the same on every rank."""

    def sum_(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=self.group)
        return value

    def top(self, z: Tensor) -> Tensor:
        """Return the largest logit of each row, over all ranks."""
        top = z.amax(-1) if z.shape[1] else z.new_full((z.shape[0],), -torch.inf)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        return top

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of each target, and whether it is this rank's. Other rows are 0."""
        at = targets - self.first
        mine = (at >= 0) & (at < self.rows)
        return at.masked_fill(~mine, 0), mine


def vocabulary_of(group: dist.ProcessGroup, padded: int, vocab_size: int) -> Vocabulary:
    """Return the share of this rank of `group`, if every rank has `padded` rows."""
    first = group.rank() * padded
    return Vocabulary(group, first, max(0, min(padded, vocab_size - first)), padded)


def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    vocabulary: Vocabulary | None = None,
    *,
    chunk: int = 0,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log p(target), of the targets' shape, and the entropy of p, [N].

    p = softmax(hidden weight^T / temperature)

    hidden      [N, H]
    weight      [V, H], of the lm_head, in the dtype of hidden
    targets     [N] int64, or [N, C] for C tokens of each row
    vocabulary  this rank's share of the rows, if ranks of a group share them
    chunk       number of rows at a time; 0 chooses one
    fused       compile all but the matmuls: three passes over the logits instead of twenty

    Results and intermediate values are float32, or float64 for float64 arguments. Both results have
    gradients to hidden and weight. N = 0 gives empty results whose gradients are 0. Raises
    ValueError unless temperature > 0.

    With a `vocabulary`, the weight is [padded, H]. All ranks have the same hidden states and
    targets, and get the same results. The gradient to `hidden` is this rank's part of a sum over
    the group.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be over 0, got {temperature}")
    # Every rank takes equally many chunks, so the number of rows comes from the padded size.
    vocab = weight.shape[0]
    keep = chunk == 0 and hidden.shape[0] * vocab <= KEEP_ELEMENTS
    rows = max(hidden.shape[0], 1) if keep else chunk or rows_at_once(hidden, vocab)
    if vocabulary is not None:
        weight = weight[: vocabulary.rows]
    several = targets if targets.dim() == 2 else targets.unsqueeze(-1)
    log_probs, entropy = _LogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, several, temperature, vocabulary, rows, keep, fused
    )
    return log_probs.view(targets.shape), entropy


@torch.no_grad()
def top_log_probs(
    hidden: Tensor, weight: Tensor, temperature: float, k: int
) -> tuple[Tensor, Tensor]:
    """Return the k likeliest tokens of each row, int64, and their log-probs, each [N, k].

    Arguments and dtypes are those of `log_probs_and_entropy`.
    """
    ids = torch.empty(hidden.shape[0], k, dtype=torch.int64, device=hidden.device)
    log_probs = ids.new_empty(ids.shape, dtype=compute_dtype(hidden))
    rows = rows_at_once(hidden, weight.shape[0])
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        z = scaled_logits(hidden[part], weight, temperature)
        log_probs[part], ids[part] = z.log_softmax(-1).topk(k)
    return ids, log_probs


@torch.no_grad()
def sum_of_squares(
    hidden: Tensor, weight: Tensor, temperature: float, vocabulary: Vocabulary | None = None
) -> Tensor:
    """Return sum_v p_v^2 of p = softmax(hidden weight^T / temperature), [N], without a gradient.

    Arguments and dtypes are those of `log_probs_and_entropy`.
    """
    sums = hidden.new_empty(hidden.shape[0], dtype=compute_dtype(hidden))
    rows = rows_at_once(hidden, weight.shape[0])
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        if vocabulary is None:
            z = scaled_logits(hidden[part], weight, temperature)
            sums[part] = z.softmax(-1).square_().sum(-1)
            continue
        z = scaled_logits(hidden[part], weight[: vocabulary.rows], temperature)
        e = z.sub_(vocabulary.top(z).unsqueeze(-1)).exp_()
        norm, squares = vocabulary.sum_(torch.stack([e.sum(-1), e.square().sum(-1)]))
        sums[part] = squares / norm.square()
    return sums


def rows_at_once(hidden: Tensor, vocab: int) -> int:
    """Return the rows of one chunk of logits."""
    return max(CHUNK_ELEMENTS["cuda" if hidden.is_cuda else "cpu"] // vocab, 1)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        vocabulary: Vocabulary | None,
        rows: int,
        keep: bool,
        fused: bool,
    ) -> tuple[Tensor, Tensor]:
        entropy = hidden.new_empty(hidden.shape[0], dtype=compute_dtype(hidden))
        log_prob, log_norm = entropy.new_empty(targets.shape), torch.empty_like(entropy)
        z = log_prob.new_empty(0)
        statistics = _compiled(_statistics) if fused else _statistics
        if vocabulary is not None:
            statistics = functools.partial(_shared_statistics, vocabulary)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            z = scaled_logits(hidden[part], weight, temperature)
            log_norm[part], log_prob[part], entropy[part] = statistics(z, targets[part])
        ctx.save_for_backward(hidden, weight, targets, log_norm, entropy, z if keep else None)
        ctx.temperature, ctx.rows, ctx.fused, ctx.vocabulary = temperature, rows, fused, vocabulary
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_norm, entropy, kept = ctx.saved_tensors
        grad_log_prob, grad_entropy = grads
        grad_hidden = torch.zeros_like(hidden)
        # This gradient is as large as the head. A frozen head needs none.
        grad_weight = (
            torch.zeros_like(weight, dtype=log_norm.dtype) if ctx.needs_input_grad[1] else None
        )
        grad_logits = _compiled(_grad_logits) if ctx.fused else _grad_logits
        to_target = grad_log_prob
        if ctx.vocabulary is not None:
            targets, mine = ctx.vocabulary.local(targets)
            to_target = None if grad_log_prob is None or not len(weight) else grad_log_prob * mine
        for start in range(0, hidden.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            grad_z = grad_logits(
                scaled_logits(hidden[part], weight, ctx.temperature) if kept is None else kept,
                log_norm[part],
                targets[part],
                entropy[part],
                None if grad_log_prob is None else grad_log_prob[part],
                None if to_target is None else to_target[part],
                None if grad_entropy is None else grad_entropy[part],
            )
            grad_z = (grad_z if ctx.temperature == 1 else grad_z.div_(ctx.temperature)).to(
                hidden.dtype
            )
            grad_hidden[part] = grad_z @ weight
            if grad_weight is not None:
                grad_weight += matmul(grad_z.t(), hidden[part])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            *[None] * 6,
        )


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _statistics(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log norm [n], log-probs of targets [n, C] and entropy [n] of scaled logits z [n, V]."""
    log_norm = z.logsumexp(-1)
    log_p = z - log_norm.unsqueeze(-1)
    log_prob = log_p.gather(-1, targets)
    # A logit of -inf has probability 0 and adds nothing to the entropy: 0 * -inf would be nan.
    entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
    return log_norm, log_prob, entropy


def _shared_statistics(
    vocabulary: Vocabulary, z: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `_statistics`, if z has this rank's part of the vocabulary."""
    top = vocabulary.top(z)
    shifted = z - top.unsqueeze(-1)
    e = shifted.exp()
    at, mine = vocabulary.local(targets)
    found = z.new_zeros(at.shape)
    if z.shape[1]:  # a rank may have no row
        found = z.gather(-1, at).masked_fill(~mine, 0.0)
    inner = (e * shifted.clamp(min=torch.finfo(e.dtype).min)).sum(-1)
    norm, inner, *found_of = vocabulary.sum_(torch.stack([e.sum(-1), inner, *found.unbind(-1)]))
    log_norm = top + norm.log()
    log_prob = torch.stack(found_of, -1) - log_norm.unsqueeze(-1)
    return log_norm, log_prob, norm.log() - inner / norm


def _grad_logits(
    z: Tensor,
    log_norm: Tensor,
    targets: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor | None,
    to_target: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient to the scaled logits z, [n, V].

    It is computed from the gradients to log-probs [n, C] and entropy [n], or None. `to_target` is
    the gradient to log-probs where z has the target's logit, and 0 elsewhere.
    """
    log_p = z - log_norm.unsqueeze(-1)
    p = log_p.exp()
    of_norm = grad_log_prob
    if grad_log_prob is not None and grad_log_prob.shape[-1] > 1:
        of_norm = grad_log_prob.sum(-1, keepdim=True)
    if grad_entropy is None:
        grad = p if of_norm is None else p.mul_(-of_norm)
        if grad_log_prob is None:
            return grad.zero_()
    else:
        inner = log_p.clamp(min=torch.finfo(log_p.dtype).min) + entropy.unsqueeze(-1)
        scale = inner.mul_(grad_entropy.unsqueeze(-1))
        if of_norm is not None:
            scale += of_norm
        grad = p.mul_(scale.neg_())
    if to_target is not None:
        grad.scatter_add_(-1, targets, to_target)
    return grad


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of results and intermediate values."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def scaled_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Return the scaled logits z = hidden weight^T / temperature, [n, V]."""
    z = matmul(hidden, weight.t())
    return z if temperature == 1 else z.div_(temperature)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the product a b in float32 or float64.

    This costs a GPU nothing: its tensor cores add up half-precision products in float32.
    """
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
