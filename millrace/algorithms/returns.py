"""Rewards of tokens, rewards to go, and whitening.

Tokens are flat, as in `ragged`: [T] trained tokens with lengths [N]. The successor of a token is
the next trained token, so the tokens of an environment between two turns cause no discount.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.algorithms.ragged import last_tokens, positions_to_end, result_dtype

if TYPE_CHECKING:
    from torch import Tensor


def place_scores(scores: Tensor, lengths: Tensor, token_rewards: Tensor | None = None) -> Tensor:
    """Return the rewards of tokens [T]: token_rewards, plus each score on its last token.

    scores is [N], and token_rewards is [T] or None, which means 0. The score of a trajectory
    without tokens is dropped.
    """
    score = scores.detach().double()
    base = (
        score.new_zeros(int(lengths.sum()))
        if token_rewards is None
        else token_rewards.detach().double()
    )
    at, has = last_tokens(lengths)
    return base.index_add(0, at, score[has]).to(result_dtype(scores))


def discounted_sums(rewards: Tensor, lengths: Tensor, discount: float | Tensor) -> Tensor:
    """Compute the reward to go, G_t = r_t + discount G_{t+1} within each trajectory, [T] from [T].

    `discount` is a number, or [T] with one number for each trajectory.

    Each step doubles the range of the sum: after step k, G_t contains 2^k rewards, from r_t on. The
    number of steps is log2 of the longest length. To the last bit, a token's sum depends only on
    its own reward and on later ones. Trajectories with equal ends therefore have equal sums there.
    """
    total = rewards.detach().double()
    remaining = positions_to_end(lengths)
    longest = int(lengths.max()) if len(lengths) else 0
    step = 1
    while step < longest:
        total = total + discount**step * total.roll(-step).where(remaining >= step, 0.0)
        step *= 2
    return total.to(result_dtype(rewards))


def whiten(values: Tensor) -> Tensor:
    """Compute (x - mean) / sqrt(var + 1e-8) over all given tokens, with unbiased variance, [T].

    One token gives 0 (verl raises an error). Equal values give exactly 0. T = 0 gives an empty
    tensor. (Source: verl's masked_whiten, without the 1e-8 added to its count.)
    """
    x = values.detach().double()
    if len(x) < 2 or bool(x.min() == x.max()):
        return x.new_zeros(x.shape).to(result_dtype(values))
    centered = x - x.mean()
    variance = centered.square().sum() / (len(x) - 1)
    return (centered * (variance + 1e-8).rsqrt()).to(result_dtype(values))
