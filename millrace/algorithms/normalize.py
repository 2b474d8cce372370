"""Normalisation of rewards and of advantages: AReaL's `reward_norm` and `adv_norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.advantages import all_equal, renumber
from millrace.algorithms.norm_options import Level, NormOptions
from millrace.algorithms.ragged import result_dtype, sequence_sums


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
        x = _centered(x, *_sets(groups, options.mean_level), leave1out=options.mean_leave1out)
    if options.std_level is not None:
        index, size = _sets(groups, options.std_level)
        squares = sequence_sums(x.square(), index, len(size))
        count = size - 1 if options.std_unbiased else size
        std = torch.where(count > 0, squares / count.clamp(min=1), 1.0).sqrt()
        x = x / (std + options.eps)[index]
    return x.to(result_dtype(values))


def _sets(groups: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """Return the number of each value's set [M], and the sizes of the sets [S]."""
    return renumber(groups if level == "group" else torch.zeros_like(groups))


def _centered(x: Tensor, index: Tensor, size: Tensor, *, leave1out: bool) -> Tensor:
    """Return x minus the mean of its set, exactly 0 if the set's values are equal."""
    centered = x - (sequence_sums(x, index, len(size)) / size)[index]
    if leave1out:
        n = size.to(x.dtype)
        centered = centered * (n / (n - 1).clamp(min=1))[index]
    return centered.masked_fill(all_equal(x, index, len(size))[index], 0.0)
