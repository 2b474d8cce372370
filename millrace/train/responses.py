"""Whole responses that ended in a batch, on which the critic trains if responses are trained in windows.

The policy trains the tokens of each window once, as soon as they are drawn. Rewards are known at
the end, so the critic then trains on the tokens of all windows, towards the rewards to go (T-PPO,
arXiv 2506.15050). Its loss is clipped around the values of the steps that trained the windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from millrace.algorithms.ragged import sequence_ids
from millrace.algorithms.returns import discounted_sums, place_scores
from millrace.algorithms.token_weights import token_weights
from millrace.schedule.continuation import whole_response
from millrace.train.layout import Ints
from millrace.train.options import StepOptions
from millrace.train.rows import Rows, rows_of_samples
from millrace.types import Sample


@dataclass(frozen=True, slots=True)
class Responses:
    """M whole responses with L tokens."""

    rows: Rows
    numbers: Ints
    """[M] number of each response's sample in the batch."""
    values: Tensor
    """[L] float64 values, each as its window was trained."""
    returns: Tensor
    """[L] float64 discounted rewards to go."""

    def members(self, samples: Ints) -> Ints:
        """Return the rows of the samples with these numbers."""
        return np.flatnonzero(np.isin(self.numbers, samples))

    def factors(self, members: Ints, options: StepOptions) -> tuple[Tensor, Tensor]:
        """Return the factor of each token's loss in the aggregate, and the mask of `members`, [L]."""
        lengths = torch.from_numpy(self.rows.trained_tokens)
        ids, chosen = sequence_ids(lengths), torch.zeros(len(lengths), dtype=torch.bool)
        chosen[torch.from_numpy(members)] = True
        mask = chosen[ids]
        kept = lengths.double() * chosen
        factors = token_weights(
            options.aggregation,
            sequence_ids=ids,
            sequence_lengths=kept,
            total_tokens=int(mask.sum()),
            total_sequences=int((kept > 0).sum()),
            scale=options.loss_scale,
            dtype=torch.float64,
        )
        return factors * mask, mask


def ended_responses(
    samples: Sequence[Sample], scores: Tensor, values: Sequence[Tensor], gamma: float
) -> Responses:
    """Return the responses of a batch that do not go on.

    scores  [N] of the batch's trajectories, one for each sample
    values  float64, of the tokens of each trajectory's own window
    """
    numbers = [i for i, sample in enumerate(samples) if not sample.goes_on]
    ended, known = list[Sample](), [torch.zeros(0, dtype=torch.float64)]
    for i in numbers:
        prompt, response = whole_response(samples[i].prompt, samples[i].trajectories[0])
        ended.append(replace(samples[i], prompt=prompt, trajectories=(response,)))
        before = samples[i].prompt.continues
        if before is not None:
            known.append(torch.tensor(before.values, dtype=torch.float64))
        known.append(values[i])
    rows = replace(rows_of_samples(ended), experts=None)
    lengths = torch.from_numpy(rows.trained_tokens)
    rewards = place_scores(scores[torch.tensor(numbers, dtype=torch.int64)], lengths)
    return Responses(
        rows=rows,
        numbers=np.array(numbers, dtype=np.int64),
        values=torch.cat(known),
        returns=discounted_sums(rewards, lengths, gamma),
    )
