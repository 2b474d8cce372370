"""Log-prob and entropy where each rank of a group has some rows of the lm_head.

The formulas are those of `millrace.train.log_probs`. Sums over the vocabulary are sums over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.train.log_probs import (
    KEEP_ELEMENTS,
    compute_dtype,
    matmul,
    rows_at_once,
    scaled_logits,
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """This rank's rows of the lm_head: from `first`, without the padded ones."""

    group: dist.ProcessGroup
    first: int
    rows: int
    padded: int
    """The rows with padding, the same on every rank."""

    def sum_(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=self.group)
        return value

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
    vocabulary: Vocabulary,
    *,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return log p(target) and the entropy, each [N], the same on every rank of the group.

    hidden   [N, H], the same on every rank
    weight   [padded, H], this rank's rows of the lm_head
    targets  [N] int64 in the whole vocabulary
    chunk    number of rows at a time; 0 chooses one

    The gradient to `hidden` is this rank's part of a sum over the group.
    """
    keep = chunk == 0 and hidden.shape[0] * vocabulary.padded <= KEEP_ELEMENTS
    # Every rank takes equally many chunks, so the number of rows comes from the padded size.
    rows = max(hidden.shape[0], 1) if keep else chunk or rows_at_once(hidden, vocabulary.padded)
    result: tuple[Tensor, Tensor] = _LogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight[: vocabulary.rows], targets, temperature, vocabulary, rows, keep
    )
    return result


@torch.no_grad()
def sum_of_squares(
    hidden: Tensor, weight: Tensor, temperature: float, vocabulary: Vocabulary
) -> Tensor:
    """Return sum_v p_v^2, [N], without a gradient."""
    sums = hidden.new_empty(hidden.shape[0], dtype=compute_dtype(hidden))
    rows, own = rows_at_once(hidden, vocabulary.padded), weight[: vocabulary.rows]
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        z = scaled_logits(hidden[part], own, temperature)
        log_norm = _log_norm(z, vocabulary)
        sums[part] = (z - log_norm.unsqueeze(-1)).exp_().square_().sum(-1)
    return vocabulary.sum_(sums)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        vocabulary: Vocabulary,
        rows: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        log_prob = hidden.new_empty(hidden.shape[0], dtype=compute_dtype(hidden))
        entropy, log_norm = torch.empty_like(log_prob), torch.empty_like(log_prob)
        z = log_prob.new_empty(0)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            z = scaled_logits(hidden[part], weight, temperature)
            top = _top(z, vocabulary)
            shifted = z - top.unsqueeze(-1)
            e = shifted.exp()
            at, mine = vocabulary.local(targets[part])
            target = _column(z, at).masked_fill(~mine, 0.0)
            # A logit of -inf has probability 0 and adds nothing to the entropy.
            inner = (e * shifted.clamp(min=torch.finfo(e.dtype).min)).sum(-1)
            norm, inner, target = vocabulary.sum_(torch.stack([e.sum(-1), inner, target]))
            log_norm[part] = top + norm.log()
            log_prob[part] = target - log_norm[part]
            entropy[part] = norm.log() - inner / norm
        ctx.save_for_backward(hidden, weight, targets, log_norm, entropy, z if keep else None)
        ctx.temperature, ctx.rows, ctx.vocabulary = temperature, rows, vocabulary
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_norm, entropy, kept = ctx.saved_tensors
        to_log_prob, to_entropy = (torch.zeros_like(entropy) if g is None else g for g in grads)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=log_norm.dtype)
        for start in range(0, hidden.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            z = scaled_logits(hidden[part], weight, ctx.temperature) if kept is None else kept
            log_p = (z - log_norm[part].unsqueeze(-1)).clamp_(min=torch.finfo(z.dtype).min)
            p = log_p.exp()
            a, b = to_log_prob[part].unsqueeze(-1), to_entropy[part].unsqueeze(-1)
            grad = p.mul_(log_p.add_(entropy[part].unsqueeze(-1)).mul_(b).add_(a).neg_())
            at, mine = ctx.vocabulary.local(targets[part])
            if grad.shape[1]:
                grad.scatter_add_(-1, at.unsqueeze(-1), (a.squeeze(-1) * mine).unsqueeze(-1))
            grad_z = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad_z @ weight
            grad_weight += matmul(grad_z.t(), hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _column(z: Tensor, at: Tensor) -> Tensor:
    """Return the logit of each row's target. A rank without rows has none."""
    return z.gather(-1, at.unsqueeze(-1)).squeeze(-1) if z.shape[1] else z.new_zeros(z.shape[0])


def _top(z: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the largest logit of each row, over all ranks."""
    top = z.amax(-1) if z.shape[1] else z.new_full((z.shape[0],), -torch.inf)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=vocabulary.group)
    return top


def _log_norm(z: Tensor, vocabulary: Vocabulary) -> Tensor:
    top = _top(z, vocabulary)
    return top + vocabulary.sum_((z - top.unsqueeze(-1)).exp().sum(-1)).log()
