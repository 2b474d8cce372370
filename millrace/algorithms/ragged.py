"""Ragged tokens: the layout that every function of this package shares.

A batch of N trajectories is flat. `[T]` tensors contain only the **trained** tokens, one trajectory
after the other. `lengths [N]` has the number of trained tokens of each trajectory. Their sum is T,
and 0 is allowed. There is no padding. Tokens of an environment, between two turns of the policy,
are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def form(result: object) -> str:
    """Return the shape of a result, or its type, as errors name it."""
    shape = getattr(result, "shape", None)
    a = f"a {type(result).__name__}"
    return a if shape is None else f"a tensor of shape {tuple(shape)}"


def sequence_ids(lengths: Tensor) -> Tensor:
    """Return the trajectory number of each token, [T] int64, from lengths [N]."""
    return lengths.new_ones(len(lengths)).cumsum(0).sub(1).repeat_interleave(lengths)


def positions_to_end(lengths: Tensor) -> Tensor:
    """Return the number of tokens behind each token of its trajectory, [T] int64."""
    ids = sequence_ids(lengths)
    return (lengths.cumsum(0) - 1)[ids] - (ids.new_ones(len(ids)).cumsum(0) - 1)


def sequence_sums(values: Tensor, ids: Tensor, num_sequences: int) -> Tensor:
    """Sum the values [T] of each trajectory.

    The result is [num_sequences], in the dtype of the values, and 0 for a trajectory without
    tokens.
    """
    return values.new_zeros(num_sequences).index_add(0, ids, values)


def result_dtype(like: Tensor) -> torch.dtype:
    """Return the dtype of a result: float64 if `like` is float64, else float32."""
    import torch

    return torch.float64 if like.dtype == torch.float64 else torch.float32


def last_tokens(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position of each trajectory's last token, and the numbers of those trajectories.

    Trajectories without tokens are left out.
    """
    has = (lengths > 0).nonzero().squeeze(-1)
    return lengths.cumsum(0)[has] - 1, has
