"""The factors that reduce token losses to one number."""

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
    """Return the factor of each token's loss, [T] in `dtype`, the dtype of the loss.

    Every mode is a weighted sum:

    mode                     factor
    token-mean               1 / total_tokens
    token-sum                1
    seq-mean-token-sum       1 / total_sequences
    seq-mean-token-sum-norm  1 / (total_sequences * scale), `scale` being Dr.GRPO's constant length
    seq-mean-token-mean      1 / (total_sequences * sequence_lengths[sequence])

    sequence_ids [T]      index into sequence_lengths of each token
    sequence_lengths [S]  trained tokens of each WHOLE sequence, even if this call has only some
    total_tokens          trained tokens of the global mini-batch
    total_sequences       its sequences with at least one trained token

    Factors are computed in float64, so every dtype of `sequence_lengths` gives full precision. The
    caller passes the counts, and they are global. The sums of micro-batches and ranks therefore add
    up to the result of one batch, for any split.

    Both totals are counted after rejection. A sequence whose tokens are all rejected therefore has
    no weight in a mean. (verl's trainers divide by the configured mini-batch size, which counts
    such a sequence. Without that size, verl's agg_loss omits the sequence too.) A total of 0 counts
    as 1, because there is nothing to add. (Source: verl's agg_loss, in
    verl/trainer/ppo/core_algos.py. Its 1e-8 in the divisor is omitted, because the sequence of a
    token has at least one token.)
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
