"""From token losses to one number, normalised by counts of the whole mini-batch.

The counts are given by the caller, never taken from the tensors at hand: so the parts that micro-batches and ranks compute
add up to what one batch would give, however it is cut.
"""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from millrace.algorithms.modes import AggMode


def token_weights(
    mode: AggMode,
    *,
    sequence_ids: Tensor,
    sequence_lengths: Tensor,
    total_tokens: int,
    total_sequences: int,
    scale: float = 1.0,
) -> Tensor:
    """The factor of each token's loss [T], float32 (float64 where sequence_lengths is): every mode is a weighted sum.

    mode                     factor
    token-mean               1 / total_tokens
    token-sum                1
    seq-mean-token-sum       1 / total_sequences
    seq-mean-token-sum-norm  1 / (total_sequences * scale)      (Dr.GRPO's constant length, given by the caller)
    seq-mean-token-mean      1 / (total_sequences * sequence_lengths[sequence])

    sequence_ids [T] integers: index into sequence_lengths. sequence_lengths [S]: trained tokens of each WHOLE sequence, also
    if only some of its tokens are here. total_tokens: trained tokens of the global mini-batch; total_sequences: its
    sequences that have one. Both after rejection: what is rejected weighs nothing in a mean (verl keeps sequences that are masked
    whole in its count). A total of 0 counts as 1: there is nothing to add then.
    (verl's agg_loss, verl/trainer/ppo/core_algos.py; its 1e-8 beside the length is left out, for a token's sequence has one.)
    """
    if mode not in get_args(AggMode):
        raise ValueError(
            f"unknown loss aggregation {mode!r}; known: {', '.join(get_args(AggMode))}"
        )
    if scale <= 0:
        raise ValueError(f"scale must be over 0, got {scale}")
    lengths = sequence_lengths if sequence_lengths.is_floating_point() else sequence_lengths.float()
    if mode == "seq-mean-token-mean":
        return (lengths.clamp(min=1) * max(total_sequences, 1)).reciprocal()[sequence_ids]
    sequences = float(max(total_sequences, 1))
    factor = {
        "token-mean": 1.0 / max(total_tokens, 1),
        "token-sum": 1.0,
        "seq-mean-token-sum": 1.0 / sequences,
        "seq-mean-token-sum-norm": 1.0 / (sequences * scale),
    }[mode]
    return lengths.new_full(sequence_ids.shape, factor)


def aggregate(
    token_loss: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    mode: AggMode,
    *,
    sequence_lengths: Tensor,
    total_tokens: int,
    total_sequences: int,
    scale: float = 1.0,
) -> Tensor:
    """This part's share of the mini-batch's loss: a scalar; the shares of all parts add up to the whole.

    token_loss [T] floating; mask [T], 0 for tokens that are not trained: those give 0 even where their loss is not finite.
    The rest is as in `token_weights`. T = 0 gives 0, with a gradient of 0 to whatever token_loss came from.
    """
    weights = token_weights(
        mode,
        sequence_ids=sequence_ids,
        sequence_lengths=sequence_lengths,
        total_tokens=total_tokens,
        total_sequences=total_sequences,
        scale=scale,
    )
    return (token_loss.masked_fill(mask == 0, 0.0) * weights.to(token_loss.dtype)).sum()
