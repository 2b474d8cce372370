"""Estimators that look at single tokens: rewards to go, GAE, ReMax, the optimal token baseline, and whitening.

Tokens are flat, as `ragged` says: [T] trained tokens, trajectory after trajectory, lengths [N]. The next token of a token is
the next trained one, so no discount is lost on what an environment said between two turns. Everything is computed in float64,
returned in float64 where the first argument is, else float32, and has no gradient. N = 0 and T = 0 give empty tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.advantages import all_equal, renumber
from millrace.algorithms.ragged import last_tokens, sequence_ids, sequence_sums


def place_scores(scores: Tensor, lengths: Tensor, token_rewards: Tensor | None = None) -> Tensor:
    """Rewards of tokens [T]: token_rewards [T] (none: 0) plus, on the last token of each trajectory, its score, from [N].

    The score of a trajectory without tokens falls away.
    """
    score = scores.detach().double()
    base = (
        score.new_zeros(int(lengths.sum()))
        if token_rewards is None
        else token_rewards.detach().double()
    )
    at, has = last_tokens(lengths)
    return base.index_add(0, at, score[has]).to(_dtype(scores))


def discounted_sums(rewards: Tensor, lengths: Tensor, discount: float = 1.0) -> Tensor:
    """G_t = r_t + discount G_{t+1} within each trajectory, [T] from rewards [T]: the reward to go.

    By doubling, log2 of the longest length in steps: after step k, G_t holds the next 2^k rewards. What follows a token alone
    decides its sum, to the last bit: equal ends of trajectories have equal sums.
    """
    total = rewards.detach().double()
    remaining = (lengths.cumsum(0) - 1)[sequence_ids(lengths)] - torch.arange(
        len(total), device=total.device
    )
    longest = int(lengths.max()) if len(lengths) else 0
    step = 1
    while step < longest:
        total = total + discount**step * torch.where(remaining >= step, total.roll(-step), 0.0)
        step *= 2
    return total.to(_dtype(rewards))


def gae(
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    gamma: float,
    lam: float,
    truncated: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438), not yet whitened, and the critic's targets; both [T].

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  target_t = A_t + V_t

    rewards [T] with the score on the last token; values [T]: V_t is the value of the state before token t. After the last
    token V and A are 0.

    truncated [N] bool: trajectories cut by the length limit did not end there. The state after their last token has V, not 0,
    and the critic has not seen it: it is taken to be that before it, V_l = V_{l-1} (the EGAE of T-PPO, arXiv 2506.15050). Their
    rewards should then have no score: whatever a cut text scored is not what V stands for.
    """
    r, v = rewards.detach().double(), values.detach().double()
    after = v.roll(-1)
    at, has = last_tokens(lengths)
    after[at] = 0.0 if truncated is None else v[at] * truncated[has]
    advantages = discounted_sums(r + gamma * after - v, lengths, gamma * lam)
    return advantages.to(_dtype(rewards)), (advantages + v).to(_dtype(rewards))


def remax(rewards: Tensor, lengths: Tensor, greedy_scores: Tensor) -> Tensor:
    """Reward to go (not discounted) minus the score of the greedy response to the same prompt (ReMax, arXiv 2310.10505), [T].

    rewards [T] with the score on the last token; greedy_scores [N].
    """
    to_go = discounted_sums(rewards.double(), lengths)
    return (to_go - greedy_scores.detach().double()[sequence_ids(lengths)]).to(_dtype(rewards))


def optimal_token_baseline(
    rewards: Tensor,
    lengths: Tensor,
    groups: Tensor,
    log_probs: Tensor,
    sum_pi_squared: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """Reward to go minus a baseline for each position, of least variance (optimal token baseline, arXiv 2602.07078), [T].

    G_t: reward to go, not discounted. w_t = (1 - 2 pi_t + sum_v pi_v^2) rho_t^2, the squared gradient of the logits;
    W_t = w_1 + ... + w_t.  B_t = sum_j G_jt W_jt / sum_j W_jt over the trajectories j of the group that have a token t.
    A_t = G_t - B_t

    t counts trained tokens, which is verl's `tir_optimal_token_baseline`, the same as its `optimal_token_baseline` where
    there is one turn. rewards [T] with the score on the last token; groups [N]; log_probs [T] and
    sum_pi_squared [T] over the vocabulary are of one policy; weights [T]: importance weights rho, 1 if not given.

    Exactly 0 where all G of a position are equal: so for a group of one, beyond the second-longest trajectory, and in a group of
    equal scores. The formula says so (B = G), and a lone trajectory has nothing to be compared with. verl puts B = 0 for a lone
    one, in its default also for a lone tail: the raw reward then rewards being the longest, and adding a constant to all rewards
    changes the gradient. Two more differences: w is not let under 0 by rounding, and verl's 1e-8 beside the sum of W is left
    out, for it pulls B to 0 where the policy is sure of itself; if every W is 0, B is the plain mean.
    """
    to_go = discounted_sums(rewards.double(), lengths)
    energy = (1 - 2 * log_probs.detach().double().exp() + sum_pi_squared.detach().double()).clamp(
        min=0
    )
    if weights is not None:
        energy = energy * weights.detach().double().square()
    # Sums from the front are sums to go of the batch read backwards.
    path = discounted_sums(energy.flip(0), lengths.flip(0)).flip(0)
    cell, size = renumber(_positions(lengths, groups))
    total = sequence_sums(path, cell, len(size))[cell]
    share = torch.where(total > 0, path / total, 1.0 / size.double()[cell])
    baseline = sequence_sums(share * to_go, cell, len(size))
    return (
        (to_go - baseline[cell])
        .masked_fill(all_equal(to_go, cell, len(size))[cell], 0.0)
        .to(_dtype(rewards))
    )


def whiten(values: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over all tokens given, the variance unbiased; [T].

    One token gives 0 (verl raises), values that are all equal give exactly 0, none give none. (verl's masked_whiten, less its
    1e-8 beside the count.)
    """
    x = values.detach().double()
    if len(x) < 2 or bool(x.min() == x.max()):
        return torch.zeros_like(x).to(_dtype(values))
    centered = x - x.mean()
    variance = centered.square().sum() / (len(x) - 1)
    return (centered * (variance + 1e-8).rsqrt()).to(_dtype(values))


def _positions(lengths: Tensor, groups: Tensor) -> Tensor:
    """One number for each pair of group and position within a trajectory, [T]."""
    ids = sequence_ids(lengths)
    position = torch.arange(len(ids), device=ids.device) - (lengths.cumsum(0) - lengths)[ids]
    longest = int(lengths.max()) if len(lengths) else 0
    return renumber(groups)[0][ids] * longest + position


def _dtype(like: Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32
