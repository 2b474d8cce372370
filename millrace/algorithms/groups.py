"""The groups of a batch, and statistics and normalisation by group.

A group with equal values gets exactly 0. So does a group of one, because it has no other
trajectory to compare with. The test for equality uses the values themselves, not their standard
deviation. In floating point, the mean of seven times 0.3 is not 0.3, and the standard deviation is
not 0. Their quotient would be an advantage made of rounding errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from millrace.algorithms.norm_options import Level, NormOptions
from millrace.algorithms.ragged import result_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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
        variance = (sets.total(x.square()) / count.clamp(min=1)).where(count > 0, 1.0)
        x = x / (variance.sqrt() + options.eps)[sets.index]
    return x.to(result_dtype(values))


def _set_of(groups: Tensor, level: Level) -> Groups:
    return Groups.of(groups if level == "group" else groups.new_zeros(groups.shape))


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
        _, index, size = groups.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
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


@dataclass(frozen=True, slots=True)
class GroupedRewards:
    """Rewards [N] in float64, their groups, and the dtype of results."""

    rewards: Tensor
    groups: Groups
    dtype: torch.dtype

    def each(self, values: Tensor) -> Tensor:
        """Give each trajectory the value [G] of its group, [N]."""
        return values[self.groups.index]

    def centered(self) -> Tensor:
        return self.groups.centered(self.rewards)

    def std(self) -> Tensor:
        """Return the unbiased standard deviation of each trajectory's group, [N]."""
        squares = self.groups.total(self.centered().square())
        return self.each((squares / (self.groups.size - 1).clamp(min=1)).sqrt())

    def result(self, advantages: Tensor) -> Tensor:
        """Set groups of equal rewards to exactly 0, and cast to the dtype of results."""
        return advantages.masked_fill(self.groups.equal(self.rewards), 0.0).to(self.dtype)


def grouped(rewards: Tensor, groups: Tensor) -> GroupedRewards:
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must both be [N]"
        )
    r = rewards.detach().double()
    if not bool(r.isfinite().all()):
        raise ValueError("a reward is not finite")
    return GroupedRewards(r, Groups.of(groups), result_dtype(rewards))
