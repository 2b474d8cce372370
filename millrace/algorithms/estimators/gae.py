"""GAE, with the critic; EGAE for truncated responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.algorithms.advantage import AdvantageBatch, AdvantageOptions, Advantages, estimator
from millrace.algorithms.ragged import last_tokens, result_dtype
from millrace.algorithms.returns import discounted_sums, place_scores

if TYPE_CHECKING:
    from torch import Tensor


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


@estimator(
    "gae", by_token=True, needs={"values"}, reads={"gamma", "lam", "bootstrap_truncated", "whiten"}
)
def _gae(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    assert batch.values is not None
    truncated, rewards = None, batch.rewards()
    if options.bootstrap_truncated:
        if batch.truncated is None:
            raise ValueError("advantage estimator gae with bootstrap_truncated needs truncated")
        truncated = batch.truncated
        rewards = place_scores(
            batch.scores.masked_fill(truncated, 0.0), batch.lengths, batch.token_rewards
        )
    estimates, targets = gae(
        rewards,
        batch.values,
        batch.lengths,
        gamma=options.gamma,
        lam=options.lam,
        truncated=truncated,
    )
    return Advantages(batch.whitened(estimates, options), targets)
