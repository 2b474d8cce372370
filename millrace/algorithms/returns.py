"""Token estimators: rewards to go, GAE, ReMax, the optimal token baseline, and whitening.

Tokens are flat, as in `ragged`: [T] trained tokens with lengths [N]. The successor of a token is
the next trained token, so the tokens of an environment between two turns cause no discount. All
functions compute in float64, without a gradient. Results are float64 if the first argument is, else
float32. N = 0 and T = 0 give empty tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.groups import Groups
from millrace.algorithms.ragged import last_tokens, result_dtype, sequence_ids


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


def discounted_sums(rewards: Tensor, lengths: Tensor, discount: float) -> Tensor:
    """Compute the reward to go, G_t = r_t + discount G_{t+1} within each trajectory, [T] from [T].

    Each step doubles the range of the sum: after step k, G_t contains 2^k rewards, from r_t on. The
    number of steps is log2 of the longest length. To the last bit, a token's sum depends only on
    its own reward and on later ones. Trajectories with equal ends therefore have equal sums there.
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
    return total.to(result_dtype(rewards))


def gae(
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    gamma: float,
    lam: float,
    truncated: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the advantages of GAE, not whitened, and the critic's targets, both [T].

    (Generalised advantage estimation, arXiv 1506.02438.)

    delta_t  = r_t + gamma V_{t+1} - V_t
    A_t      = delta_t + gamma lam A_{t+1}
    target_t = A_t + V_t

    rewards [T] have the score on the last token. values [T]: V_t is the value of the state before
    token t. After the last token, V and A are 0.

    truncated [N] bool marks trajectories that the length limit cut. They did not end there, so the
    state after their last token has a V that is not 0. The critic did not evaluate that state. Its
    value is taken from the state before it, V_l = V_{l-1} (the EGAE of T-PPO, arXiv 2506.15050).
    The rewards of such trajectories should have no score, because the score of a cut text is not an
    estimate of V.
    """
    r, v = rewards.detach().double(), values.detach().double()
    after = v.roll(-1)
    at, has = last_tokens(lengths)
    after[at] = 0.0 if truncated is None else v[at] * truncated[has]
    advantages = discounted_sums(r + gamma * after - v, lengths, gamma * lam)
    return advantages.to(result_dtype(rewards)), (advantages + v).to(result_dtype(rewards))


def remax(rewards: Tensor, lengths: Tensor, greedy_scores: Tensor) -> Tensor:
    """Compute the undiscounted reward to go minus the greedy response's score, [T].

    (ReMax, arXiv 2310.10505.) rewards [T] have the score on the last token. greedy_scores [N] are
    the scores of the greedy responses to the same prompts.
    """
    to_go = discounted_sums(rewards.double(), lengths, 1.0)
    return (to_go - greedy_scores.detach().double()[sequence_ids(lengths)]).to(
        result_dtype(rewards)
    )


def optimal_token_baseline(
    rewards: Tensor,
    lengths: Tensor,
    groups: Tensor,
    log_probs: Tensor,
    sum_pi_squared: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute the reward to go minus the baseline of least variance for each position, [T].

    (Optimal token baseline, arXiv 2602.07078.)

    G_t = the reward to go, not discounted
    w_t = (1 - 2 pi_t + sum_v pi_v^2) rho_t^2, the squared gradient of the logits
    W_t = w_1 + ... + w_t
    B_t = sum_j G_jt W_jt / sum_j W_jt over the trajectories j of the group that have a token t
    A_t = G_t - B_t

    t counts trained tokens, as in verl's `tir_optimal_token_baseline`. With a single turn, that
    equals verl's `optimal_token_baseline`. rewards [T] have the score on the last token. groups is
    [N]. log_probs [T] and sum_pi_squared [T] (over the vocabulary) are of one policy. weights [T]
    are the importance weights rho, 1 if None.

    The result is exactly 0 where all G of a position are equal, as the formula gives (B = G).
    Examples are a group of one, positions beyond the second-longest trajectory, and a group of
    equal scores.

    There are three differences to verl:

    - verl sets B = 0 for a single trajectory, and by default also for a single tail. The raw reward
      then rewards the longest trajectory, and a constant added to all rewards changes the gradient.
    - Here, rounding cannot make w negative.
    - verl adds 1e-8 to the sum of W, which pulls B to 0 where the policy is certain. Here, B is the
      plain mean if every W is 0.
    """
    to_go = discounted_sums(rewards.double(), lengths, 1.0)
    energy = (1 - 2 * log_probs.detach().double().exp() + sum_pi_squared.detach().double()).clamp(
        min=0
    )
    if weights is not None:
        energy = energy * weights.detach().double().square()
    # A sum from the front equals a sum to go of the reversed batch.
    path = discounted_sums(energy.flip(0), lengths.flip(0), 1.0).flip(0)
    cells = Groups.of(_positions(lengths, groups))
    total = cells.total(path)[cells.index]
    share = torch.where(total > 0, path / total, 1.0 / cells.size.double()[cells.index])
    baseline = cells.total(share * to_go)[cells.index]
    advantages = (to_go - baseline).masked_fill(cells.equal(to_go), 0.0)
    return advantages.to(result_dtype(rewards))


def whiten(values: Tensor) -> Tensor:
    """Compute (x - mean) / sqrt(var + 1e-8) over all given tokens, with unbiased variance, [T].

    One token gives 0 (verl raises an error). Equal values give exactly 0. T = 0 gives an empty
    tensor. (Source: verl's masked_whiten, without the 1e-8 added to its count.)
    """
    x = values.detach().double()
    if len(x) < 2 or bool(x.min() == x.max()):
        return torch.zeros_like(x).to(result_dtype(values))
    centered = x - x.mean()
    variance = centered.square().sum() / (len(x) - 1)
    return (centered * (variance + 1e-8).rsqrt()).to(result_dtype(values))


def _positions(lengths: Tensor, groups: Tensor) -> Tensor:
    """Return one number for each pair of group and position within a trajectory, [T]."""
    ids = sequence_ids(lengths)
    position = torch.arange(len(ids), device=ids.device) - (lengths.cumsum(0) - lengths)[ids]
    longest = int(lengths.max()) if len(lengths) else 0
    return Groups.of(groups).index[ids] * longest + position
