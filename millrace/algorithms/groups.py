"""Groups of values, and their normalisation: AReaL's `reward_norm` and `adv_norm`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.algorithms.norm_options import Level, NormOptions


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
