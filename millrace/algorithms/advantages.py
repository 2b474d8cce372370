"""Estimators of advantages, the groups of a batch, and their normalisation.

**Outcome estimators** give one number for each trajectory, from the rewards. They take rewards [N]
of any real dtype and groups [N]. Groups are integers, equal for trajectories of one prompt, in any
order and of any size. All raise ValueError if shapes differ or a reward is not finite.

A group with equal rewards gets exactly 0. So does a group of one, because it has no other
trajectory to compare with. The test for equality uses the rewards themselves, not their standard
deviation. In floating point, the mean of seven times 0.3 is not 0.3, and the standard deviation is
not 0. Their quotient would be an advantage made of rounding errors.

**Token estimators** are rewards to go, GAE, ReMax, the optimal token baseline, and whitening.
Tokens are flat, as in `ragged`: [T] trained tokens with lengths [N]. The successor of a token is
the next trained token, so the tokens of an environment between two turns cause no discount.

All functions compute in float64, without a gradient. Results are float64 if the first argument is,
else float32. N = 0 and T = 0 give empty tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from millrace.algorithms.norm_options import Level, NormOptions
from millrace.algorithms.ragged import last_tokens, result_dtype, sequence_ids


def normalize(values: Tensor, groups: Tensor, options: NormOptions) -> Tensor:
    """Compute (x - mean) / (std + eps), each of the two over the batch or the value's group, [M].

    values [M] of any real dtype are rewards of trajectories, or advantages of trained tokens.
    groups [M] are integers, equal for values of one prompt. So the group of tokens is all tokens of
    the prompt's trajectories. The computation is in float64. The result has no gradient, and the
    dtype of `ragged.result_dtype`. M = 0 gives an empty tensor.

    - With mean_leave1out, the mean is that of the other values: x - mean becomes n / (n - 1) as
      large.
    - The standard deviation is about the mean that is subtracted, and about 0 without one.
    - A set of one value has the standard deviation 1 if std_unbiased is set.
    - Values that are all equal within their mean_level give exactly 0, so a set of one gives 0.

    (AReaL, areal/utils/data.py, `Normalization`.) There are three differences to AReaL:

    - AReaL cuts the batch into groups of a fixed size by position. Here, a group is a prompt, so it
      may have any size.
    - AReaL keeps the raw value of a group of one with mean_leave1out. That reinforces any response.
    - AReaL rounds to float32, and leaves rounding errors for values that are equal.

    Raises ValueError if shapes differ.
    """
    if values.ndim != 1 or values.shape != groups.shape:
        raise ValueError(
            f"values {tuple(values.shape)} and groups {tuple(groups.shape)} must both be [M]"
        )
    x = values.detach().double()
    if options.mean_level is not None:
        x = _set_of(groups, options.mean_level).centered(x, leave1out=options.mean_leave1out)
    if options.std_level is not None:
        sets = _set_of(groups, options.std_level)
        count = sets.size - 1 if options.std_unbiased else sets.size
        variance = torch.where(count > 0, sets.total(x.square()) / count.clamp(min=1), 1.0)
        x = x / (variance.sqrt() + options.eps)[sets.index]
    return x.to(torch.float64 if values.dtype == torch.float64 else torch.float32)


def _set_of(groups: Tensor, level: Level) -> Groups:
    return Groups.of(groups if level == "group" else torch.zeros_like(groups))


@dataclass(frozen=True, slots=True)
class Groups:
    """The group of each of N values, G in all."""

    index: Tensor
    """[N] int64, 0 to G - 1, in the order of the groups' numbers."""
    size: Tensor
    """[G] int64, values of each group."""

    @classmethod
    def of(cls, groups: Tensor) -> Groups:
        """Number the groups of integers [N] that are equal."""
        _, index, size = torch.unique(groups, return_inverse=True, return_counts=True)
        return cls(index, size)

    def total(self, values: Tensor) -> Tensor:
        """Sum the values [N] of each group, [G]."""
        return values.new_zeros(len(self.size)).index_add(0, self.index, values)

    def centered(self, values: Tensor, *, leave1out: bool = False) -> Tensor:
        """Return the values [N] minus the mean of their group, exactly 0 if the group is equal."""
        centered = values - (self.total(values) / self.size)[self.index]
        if leave1out:
            n = self.size.to(values.dtype)
            centered = centered * (n / (n - 1).clamp(min=1))[self.index]
        return centered.masked_fill(self.equal(values), 0.0)

    def equal(self, values: Tensor) -> Tensor:
        """Return for each of the values [N] whether its group's values are all equal, [N] bool."""
        return (self.extreme(values, "amin") == self.extreme(values, "amax"))[self.index]

    def extreme(self, values: Tensor, which: str) -> Tensor:
        """Return the smallest (which="amin") or the largest ("amax") value of each group, [G]."""
        none = values.new_zeros(len(self.size))
        return none.scatter_reduce_(0, self.index, values, which, include_self=False)


def grpo(rewards: Tensor, groups: Tensor, *, norm_by_std: bool, eps: float) -> Tensor:
    """Compute (r_i - mean_g) / (std_g + eps), with an unbiased std (GRPO, arXiv 2402.03300, eq. 4).

    `norm_by_std=False` omits the division (Dr.GRPO, arXiv 2503.20783).

    For a group of one, this function returns 0. verl returns the raw reward. That reinforces any
    response, at a scale that no other group has.
    """
    g = _grouped(rewards, groups)
    centered = g.centered()
    return g.result(centered / (g.std() + eps) if norm_by_std else centered)


def grpo_passk(rewards: Tensor, groups: Tensor, *, norm_by_std: bool, eps: float) -> Tensor:
    """Give (r_1st - r_2nd) / (std_g + eps) to the best of a group, and 0 to the others.

    This is pass@k (arXiv 2503.19595). If two trajectories share the best reward, all get 0. A group
    of one also gets 0, because pass@k needs a second best. (verl raises an error for it. A run then
    ends if only one trajectory of a group remains.) std_g and `norm_by_std` are as in `grpo`.
    """
    g = _grouped(rewards, groups)
    best = g.each(g.groups.extreme(g.rewards, "amax"))
    at_best = g.rewards == best
    alone = at_best & g.each(g.groups.total(at_best.double()) == 1)
    second = g.each(g.groups.extreme(g.rewards.masked_fill(at_best, -torch.inf), "amax"))
    gap = torch.where(alone, best - second, 0.0)
    return g.result(gap / (g.std() + eps) if norm_by_std else gap)


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Compute r_i minus the mean of the other rewards of its group (RLOO, arXiv 2402.14740).

    This equals n / (n - 1) (r_i - mean_g). A group of one has no other rewards and gets 0, as in
    verl's `rloo_vectorized`. For such a group, verl's `rloo` returns the raw reward.
    """
    g = _grouped(rewards, groups)
    n = g.groups.size.double()
    return g.result(g.each(n / (n - 1).clamp(min=1)) * g.centered())


def opo(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Compute r_i - sum_j L_j r_j / sum_j L_j over the group of i (OPO, arXiv 2505.23585).

    This baseline has the least variance if squared gradients are proportional to L. lengths [N] are
    the numbers L of trained tokens. A group without tokens has nothing to train and gets 0 (verl
    divides 0 by 0). A group of one gets 0, as the formula gives (verl omits the baseline).
    """
    g = _grouped(rewards, groups)
    if lengths.shape != rewards.shape:
        raise ValueError(f"lengths {tuple(lengths.shape)} must be {tuple(rewards.shape)}")
    length = lengths.detach().double()
    total = g.each(g.groups.total(length))
    # Compute the shares first. If one trajectory has all tokens, its share is exactly 1, and its
    # advantage is exactly 0.
    baseline = g.each(g.groups.total(length / total.clamp(min=1) * g.rewards))
    return g.result((g.rewards - baseline).masked_fill(total == 0, 0.0))


def gpg(rewards: Tensor, groups: Tensor, *, f_norm: float | Literal["std"], eps: float) -> Tensor:
    """Compute alpha (r_i - mean_g) / F_norm with alpha = N / (N - M) (GPG, arXiv 2504.02546).

    N is the number of trajectories, and M the number of those in groups of equal rewards. The M
    trajectories have no gradient and shrink a mean over all trajectories. alpha corrects this. If
    no trajectory has a gradient, all advantages are 0.

    `f_norm` is the divisor F_norm, a number or "std": std_g + eps of `grpo`. GPG has 1, and "std"
    is GRPO's divisor. verl's function takes a number, and no key of verl sets it.

    In the paper and in its authors' code, groups of equal rewards are those that are all right or
    all wrong. Instead of N - M, verl counts the scores that are not 0. It thereby treats a wrong
    answer as a sample without gradient. With rewards of -1 and 1, its alpha is 1.
    """
    g = _grouped(rewards, groups)
    useful = int((~g.groups.equal(g.rewards)).sum())
    scaled = g.centered() * (len(g.rewards) / max(useful, 1))
    return g.result(scaled / (g.std() + eps if f_norm == "std" else f_norm))


def gdpo(
    components: Mapping[str, Tensor],
    groups: Tensor,
    *,
    weights: Mapping[str, float] | None,
    norm_by_std: bool,
    eps: float,
) -> Tensor:
    """Compute sum_k w_k grpo(r_k): each reward is normalised within its group, then all are added.

    (GDPO, arXiv 2601.05242.) `components` are the rewards by name, each [N]. `weights` are the w_k
    by name, 1 for a missing name. `estimators` whitens afterwards. A component that is equal within
    a group adds exactly 0 in that group.

    Raises ValueError without components, and for a weight of an unknown component.
    """
    chosen = dict(weights or {})
    unknown = sorted(set(chosen) - set(components))
    if not components or unknown:
        raise ValueError(
            f"gdpo needs components, got {sorted(components)}; unknown names in weights: {unknown}"
        )
    parts = [
        grpo(r, groups, norm_by_std=norm_by_std, eps=eps) * chosen.get(name, 1.0)
        for name, r in components.items()
    ]
    return torch.stack(parts).sum(0)


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Rewards [N] in float64, their groups, and the dtype of results."""

    rewards: Tensor
    groups: Groups
    dtype: torch.dtype

    def each(self, values: Tensor) -> Tensor:
        """Give each trajectory the value [G] of its group, [N]."""
        return values[self.groups.index]

    def centered(self) -> Tensor:
        return self.groups.centered(self.rewards)

    def std(self) -> Tensor:
        """Return the unbiased standard deviation of each trajectory's group, [N]."""
        squares = self.groups.total(self.centered().square())
        return self.each((squares / (self.groups.size - 1).clamp(min=1)).sqrt())

    def result(self, advantages: Tensor) -> Tensor:
        """Set groups of equal rewards to exactly 0, and cast to the dtype of results."""
        return advantages.masked_fill(self.groups.equal(self.rewards), 0.0).to(self.dtype)


def _grouped(rewards: Tensor, groups: Tensor) -> _Grouped:
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must both be [N]"
        )
    r = rewards.detach().to(torch.float64)
    if not bool(torch.isfinite(r).all()):
        raise ValueError("a reward is not finite")
    return _Grouped(r, Groups.of(groups), result_dtype(rewards))


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
