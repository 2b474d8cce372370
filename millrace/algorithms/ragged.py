"""Ragged tokens: the layout that every function of this package shares.

A batch of N trajectories is flat: `[T]` tensors hold the **trained** tokens alone, trajectory after trajectory, and
`lengths [N]` says how many each has (0 is allowed; they add up to T). There is no padding and no token of an environment: what
stands between two turns of the policy is simply not there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_ids(lengths: Tensor) -> Tensor:
    """Number of the trajectory of each token, [T] int64, from lengths [N]."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def sequence_sums(values: Tensor, ids: Tensor, num_sequences: int) -> Tensor:
    """Sum over the tokens of each trajectory, [num_sequences] in the dtype of `values` [T]; 0 where it has none."""
    return values.new_zeros(num_sequences).index_add(0, ids, values)


def last_tokens(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Position of the last token of each trajectory that has one, and the numbers of those trajectories."""
    has = (lengths > 0).nonzero().squeeze(-1)
    return lengths.cumsum(0)[has] - 1, has
