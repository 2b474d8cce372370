"""Ragged tokens: the layout that every function of this package shares.

A batch of N trajectories is flat. `[T]` tensors contain only the **trained** tokens, trajectory
after trajectory. `lengths [N]` has the number of tokens of each trajectory (0 is allowed; the sum
is T). There is no padding and no token of an environment: tokens between two turns of the policy
are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_ids(lengths: Tensor) -> Tensor:
    """Return the trajectory number of each token, [T] int64, from lengths [N]."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def sequence_sums(values: Tensor, ids: Tensor, num_sequences: int) -> Tensor:
    """Sum the values [T] of each trajectory, [num_sequences] in their dtype, 0 without tokens."""
    return values.new_zeros(num_sequences).index_add(0, ids, values)


def last_tokens(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position of each trajectory's last token, and the numbers of those trajectories.

    Trajectories without tokens are left out.
    """
    has = (lengths > 0).nonzero().squeeze(-1)
    return lengths.cumsum(0)[has] - 1, has
