"""The weight of each token in a mini-batch: the factors of an aggregation, and selections.

A selection is by covariance (arXiv 2505.22617) or by entropy.
"""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from millrace.algorithms.policy_loss import AggMode


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


SLACK = 1e-9
"""Slack of a position among sorted tokens, for the rounding of 1 - share."""


def covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return cov_t = (A_t - mean A) (log pi_t - mean log pi), [T] float64, detached.

    (arXiv 2505.22617.) Both means are over all trained tokens. A token with a large covariance
    lowers the entropy. The result is NaN where mask is false. log_probs and advantages are [T]
    floating, mask is [T] bool. log_probs are those of the policy under training. At the first step
    on a batch, they equal the old ones.

    Pass the WHOLE mini-batch, of all ranks, because the selection is a share of its tokens. verl
    computes means, share and draw for each micro-batch. With a share of 2e-4, it then selects one
    token in every micro-batch of up to 9,999 tokens, whatever their covariances are. verl also
    draws from an unseeded permutation, so ranks disagree and runs cannot be repeated.
    """
    result = log_probs.new_full(log_probs.shape, torch.nan, dtype=torch.float64)
    a, logp = (x.detach()[mask].double() for x in (advantages, log_probs))
    result[mask] = (a - a.mean()) * (logp - logp.mean())
    return result


def kl_cov_tokens(log_probs: Tensor, advantages: Tensor, mask: Tensor, *, ratio: float) -> Tensor:
    """Mark the max(int(ratio * trained tokens), 1) trained tokens of largest covariance, [T] bool.

    Among equal covariances, earlier tokens of the batch come first. Without trained tokens, no
    token is marked. Raises ValueError unless 0 < ratio <= 1.
    """
    cov = covariances(log_probs, advantages, mask)
    at = mask.nonzero().squeeze(-1)
    order = cov[at].argsort(descending=True, stable=True)
    return _marked(mask, at[order[: _count(ratio, len(at))]])


def clip_cov_tokens(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio: float,
    lower: float,
    upper: float,
    generator: torch.Generator,
    clipped: Tensor | None = None,
) -> Tensor:
    """Mark random tokens with lower < cov < upper, [T] bool.

    The number of tokens is max(int(ratio * trained tokens), 1), or all candidates if there are
    fewer. `clipped` [T] bool marks tokens that PPO's clip leaves without a gradient. They are never
    drawn, as in verl. While log_probs are the old ones, there are no such tokens. The draw depends
    on the generator's state alone, so equal seeds give equal tokens on every rank.

    Raises ValueError unless 0 < ratio <= 1 and lower < upper.
    """
    if not lower < upper:
        raise ValueError(f"lower must be below upper, got {lower} and {upper}")
    cov = covariances(log_probs, advantages, mask)
    candidate = (cov > lower) & (cov < upper)
    if clipped is not None:
        candidate &= ~clipped
    at = candidate.nonzero().squeeze(-1)
    count = _count(ratio, int(mask.sum()))
    drawn = torch.randperm(len(at), generator=generator, device=generator.device)[:count]
    return _marked(mask, at[drawn.to(at.device)])


def _count(ratio: float, tokens: int) -> int:
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be over 0 and at most 1, got {ratio}")
    return max(int(ratio * tokens), 1)


def _marked(mask: Tensor, positions: Tensor) -> Tensor:
    return torch.zeros_like(mask, dtype=torch.bool).index_fill(0, positions, True)


def high_entropy(entropies: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """Mark the trained tokens with the largest entropies, [T] bool.

    (Forking tokens, arXiv 2506.01939; TRL's `top_entropy_quantile`.) A token is marked if its
    entropy is at least the (1 - share) quantile of the trained tokens, interpolated linearly. Equal
    entropies are marked together, so the marked share may be larger. share = 1 marks all.

    entropies [T] floating are of the policy under training, and mask [T] bool marks the trained
    tokens. Pass the WHOLE mini-batch, of all ranks, because the quantile is over its tokens. TRL
    takes it over one micro-batch of all ranks. Multiply the policy's token losses by the result:
    other tokens have no policy gradient and still count in denominators, as in the paper. That holds
    only if the loss of a token has no gradient to other tokens: not for the modes in `modes.JOINT`.

    Raises ValueError unless 0 < share <= 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be over 0 and at most 1, got {share}")
    if not bool(mask.any()):
        return torch.zeros_like(mask)
    ordered = entropies.detach()[mask].sort().values
    # No entropy is between the interpolated quantile and the next token above it.
    first = math.ceil((1 - share) * (len(ordered) - 1) - SLACK)
    return mask & (entropies.detach() >= ordered[first])
