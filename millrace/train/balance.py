"""The loss that balances the experts of a mixture, sequence by sequence and layer by layer.

A sequence is never divided among micro-batches, and its tokens are counted before its gradient is
made. So the loss is the same for any number of ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace.train.layout import Ints
from millrace.train.packing import MicroBatch
from millrace.train.rows import Rows


@dataclass(frozen=True, slots=True)
class Sequences:
    """The tokens of each sequence of a micro-batch that a rank has."""

    token: Tensor
    """[C] int64 a token, numbered on this rank."""
    row: Tensor
    """[C] int64 its sequence."""
    lengths: Tensor
    """[R] float32 tokens of each sequence, on all ranks that share the micro-batch."""


def num_sequences(rows: Rows, members: Ints) -> int:
    """Return the number of sequences of a mini-batch, on all ranks, and at least 1."""
    return max(int((rows.inputs[members] > 0).sum()), 1)


def sequences_of(batch: MicroBatch, first: int, tokens: int) -> Sequences:
    """Return the sequences of a micro-batch, on a rank with `tokens` tokens from `first` on."""
    token, _ = batch.cells or (np.zeros(0, dtype=np.int64),) * 2
    lengths = np.asarray(batch.layout.lengths if batch.cells else ())
    row = np.repeat(np.arange(len(lengths)), lengths.astype(np.int64))
    own = (token >= first) & (token < first + tokens)
    device = batch.input_ids.device
    at, of = (torch.from_numpy(x[own]).to(device) for x in (token - first, row))
    return Sequences(at, of, torch.from_numpy(lengths.astype(np.float32)).to(device))


def balance_loss(
    probs: Tensor, own: Tensor, sequences: Sequences, add_up: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the sum over sequences of experts / k x sum over experts of f P: Megatron's.

    f is the share of a sequence's tokens that choose an expert, and P the mean of its probability.

    probs   [T, experts] the router's probabilities
    own     [T, k] the router's own choice
    add_up  adds up counts over the ranks that share the micro-batch

    The result is this rank's share of the sum. Only P has a gradient.
    """
    shape, (_, experts) = (len(sequences.lengths), probs.shape[1]), probs.shape
    chosen = torch.zeros_like(probs, requires_grad=False).scatter_(1, own, 1.0)
    f, p = (
        probs.new_zeros(shape).index_add(0, sequences.row, x.index_select(0, sequences.token))
        for x in (chosen, probs)
    )
    squares = sequences.lengths.square().unsqueeze(1)
    return (add_up(f) * p / squares).sum() * (experts / own.shape[1])


class _WithLoss(torch.autograd.Function):
    """Return a tensor as it is. Its backward pass also adds the gradient of a loss."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.like = weight, loss
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], torch.full_like(ctx.like, ctx.weight), None


def with_loss(tensor: Tensor, loss: Tensor, weight: float) -> Tensor:
    """Return `tensor`. Wherever it is used, `weight` x `loss` is part of the loss of the step."""
    found: Tensor = _WithLoss.apply(tensor, loss, weight)  # type: ignore[no-untyped-call]
    return found
