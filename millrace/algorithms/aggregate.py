"""From token losses to one number, normalised by counts of the whole mini-batch.

The counts are given by the caller, never taken from the tensors at hand: so the parts that micro-batches and ranks compute
add up to what one batch would give, however it is cut.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from millrace.algorithms.modes import AggMode


def token_weights(
    mode: AggMode,
    *,
    sequence_ids: Tensor,
    sequence_lengths: Tensor,
    total_tokens: int,
    total_sequences: int,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the factor of each token's loss, [T] in `dtype`, which is that of the loss. Every mode is a weighted sum.

    mode                     factor
    token-mean               1 / total_tokens
    token-sum                1
    seq-mean-token-sum       1 / total_sequences
    seq-mean-token-sum-norm  1 / (total_sequences * scale)      (Dr.GRPO's constant length, given by the caller)
    seq-mean-token-mean      1 / (total_sequences * sequence_lengths[sequence])

    Factors are computed in float64, so that no dtype of `sequence_lengths` costs precision.

    sequence_ids [T] integers: index into sequence_lengths. sequence_lengths [S]: trained tokens of each WHOLE sequence, also
    if only some of its tokens are here. total_tokens: trained tokens of the global mini-batch; total_sequences: its
    sequences that have one. Both are counted after rejection, so a sequence that is masked whole
    weighs nothing in a mean. (verl's trainers divide by the configured size of the mini-batch, which
    counts such a sequence. Without that size, its agg_loss leaves the sequence out too.) A total of 0
    counts as 1: there is nothing to add then.
    (verl's agg_loss, verl/trainer/ppo/core_algos.py; its 1e-8 beside the length is left out, for a token's sequence has one.)
    """
    if mode not in get_args(AggMode):
        raise ValueError(
            f"unknown loss aggregation {mode!r}; known: {', '.join(get_args(AggMode))}"
        )
    if scale <= 0:
        raise ValueError(f"scale must be over 0, got {scale}")
    sequences = max(total_sequences, 1)
    if mode == "seq-mean-token-mean":
        lengths = sequence_lengths.double().clamp(min=1)
        return (lengths * sequences).reciprocal().to(dtype)[sequence_ids]
    factor = {
        "token-mean": 1.0 / max(total_tokens, 1),
        "token-sum": 1.0,
        "seq-mean-token-sum": 1.0 / sequences,
        "seq-mean-token-sum-norm": 1.0 / (sequences * scale),
    }[mode]
    return torch.full(sequence_ids.shape, factor, dtype=dtype, device=sequence_ids.device)
