"""ReMax: the greedy response as the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.algorithms.advantage import AdvantageBatch, AdvantageOptions, estimator
from millrace.algorithms.ragged import result_dtype, sequence_ids
from millrace.algorithms.returns import discounted_sums

if TYPE_CHECKING:
    from torch import Tensor


def remax(rewards: Tensor, lengths: Tensor, greedy_scores: Tensor) -> Tensor:
    """Compute the undiscounted reward to go minus the greedy response's score, [T].

    (ReMax, arXiv 2310.10505.) rewards [T] have the score on the last token. greedy_scores [N] are
    the scores of the greedy responses to the same prompts.
    """
    to_go = discounted_sums(rewards.double(), lengths, 1.0)
    return (to_go - greedy_scores.detach().double()[sequence_ids(lengths)]).to(
        result_dtype(rewards)
    )


@estimator("remax", by_token=True, needs={"greedy_scores"}, not_normalised="the greedy scores")
def _remax(batch: AdvantageBatch, options: AdvantageOptions) -> Tensor:
    assert batch.greedy_scores is not None
    return remax(batch.rewards(), batch.lengths, batch.greedy_scores)
