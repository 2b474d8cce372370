"""Which groups of trajectories are worth training on."""

from __future__ import annotations

from collections.abc import Sequence


def equal_outcomes(values: Sequence[float]) -> bool:
    """Whether the outcomes of a group are all equal: then dynamic sampling (DAPO, arXiv 2503.14476) drops it.

    `values` are the rewards, or another outcome, of a group's trajectories. Compared exactly, without a tolerance: a standard
    deviation is not 0 for seven times 0.3. A group of one, or of none, counts as equal: there is nothing to compare with. NaN
    equals nothing.
    """
    return all(value == values[0] for value in values[1:])
