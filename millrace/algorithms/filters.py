"""The test for groups of trajectories without a learning signal."""

from __future__ import annotations

from collections.abc import Sequence


def equal_outcomes(values: Sequence[float]) -> bool:
    """Return whether the outcomes of a group are all equal.

    Dynamic sampling (DAPO, arXiv 2503.14476) drops such a group. `values` are the rewards, or
    another outcome, of the group's trajectories. They are compared exactly, without a tolerance. A
    standard deviation would not do: for seven times 0.3 it is not 0. A group of one or of none
    counts as equal, because there is nothing to compare. A NaN in a larger group makes it unequal.
    """
    return all(value == values[0] for value in values[1:])
