"""GAE, with the critic; EGAE for truncated responses, and for those that another sample continues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.algorithms.advantage import AdvantageBatch, AdvantageOptions, Advantages, estimator
from millrace.algorithms.ragged import last_tokens, result_dtype
from millrace.algorithms.returns import discounted_sums, place_scores

if TYPE_CHECKING:
    from torch import Tensor

ALPHA = 0.05
"""The factor of VAPO's length-adaptive lambda (arXiv 2504.05118)."""


def gae(
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    truncated: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the advantages of GAE, not whitened, and the critic's targets, both [T].

    (Generalised advantage estimation, arXiv 1506.02438.)

    delta_t  = r_t + gamma V_{t+1} - V_t
    A_t      = delta_t + gamma lam A_{t+1}
    target_t = A_t + V_t

    rewards [T] have the score on the last token. values [T]: V_t is the value of the state before
    token t. After the last token, V and A are 0. lam is a number, or [T] with one number for each
    trajectory.

    truncated [N] bool marks trajectories that the length limit or the end of a window cut. They did
    not end there, so the state after their last token has a V that is not 0. The critic did not
    evaluate that state. Its value is taken from the state before it, V_l = V_{l-1} (the EGAE of
    T-PPO, arXiv 2506.15050). The rewards of such trajectories should have no score, because the
    score of a cut text is not an estimate of V.
    """
    r, v = rewards.detach().double(), values.detach().double()
    after = v.roll(-1)
    at, has = last_tokens(lengths)
    after[at] = 0.0 if truncated is None else v[at] * truncated[has]
    advantages = discounted_sums(r + gamma * after - v, lengths, gamma * lam)
    return advantages.to(result_dtype(rewards)), (advantages + v).to(result_dtype(rewards))


def adaptive_lam(lengths: Tensor, least: float) -> Tensor:
    """Compute lambda for responses of `lengths` tokens: max(1 - 1 / (0.05 length), least), [N].

    (VAPO, arXiv 2504.05118, with T-PPO's least value.)
    """
    return (1 - 1 / (ALPHA * lengths.double().clamp(min=1))).clamp(min=least)


@estimator(
    "gae",
    by_token=True,
    needs={"values"},
    reads={"gamma", "lam", "bootstrap_truncated", "adaptive_lam", "whiten"},
)
def _gae(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    assert batch.values is not None
    cut = batch.goes_on
    lam: float | Tensor = options.lam
    if options.bootstrap_truncated:
        if batch.truncated is None:
            raise ValueError("advantage estimator gae with bootstrap_truncated needs truncated")
        cut = batch.truncated if cut is None else cut | batch.truncated
    if options.adaptive_lam:
        if batch.response_lengths is None:
            raise ValueError("advantage estimator gae with adaptive_lam needs response_lengths")
        lam = batch.each_token(adaptive_lam(batch.response_lengths, options.lam))
    scores = batch.scores if cut is None else batch.scores.masked_fill(cut, 0.0)
    estimates, targets = gae(
        place_scores(scores, batch.lengths, batch.token_rewards),
        batch.values,
        batch.lengths,
        gamma=options.gamma,
        lam=lam,
        truncated=cut,
    )
    return Advantages(batch.whitened(estimates, options), targets)
