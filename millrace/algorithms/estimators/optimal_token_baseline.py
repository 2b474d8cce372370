"""The optimal token baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.algorithms.advantage import AdvantageBatch, AdvantageOptions, estimator
from millrace.algorithms.groups import Groups
from millrace.algorithms.ragged import result_dtype, sequence_ids
from millrace.algorithms.returns import discounted_sums

if TYPE_CHECKING:
    from torch import Tensor


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
    share = (path / total).where(total > 0, 1.0 / cells.size.double()[cells.index])
    baseline = cells.total(share * to_go)[cells.index]
    advantages = (to_go - baseline).masked_fill(cells.equal(to_go), 0.0)
    return advantages.to(result_dtype(rewards))


@estimator(
    "optimal_token_baseline",
    by_token=True,
    needs={"log_probs", "sum_pi_squared"},
    group_relative=True,
)
def _optimal_token_baseline(batch: AdvantageBatch, options: AdvantageOptions) -> Tensor:
    assert batch.log_probs is not None and batch.sum_pi_squared is not None
    return optimal_token_baseline(
        batch.rewards(),
        batch.lengths,
        batch.groups,
        batch.log_probs,
        batch.sum_pi_squared,
        batch.weights,
    )


def _positions(lengths: Tensor, groups: Tensor) -> Tensor:
    """Return one number for each pair of group and position within a trajectory, [T]."""
    ids = sequence_ids(lengths)
    position = (ids.new_ones(len(ids)).cumsum(0) - 1) - (lengths.cumsum(0) - lengths)[ids]
    longest = int(lengths.max()) if len(lengths) else 0
    return Groups.of(groups).index[ids] * longest + position
