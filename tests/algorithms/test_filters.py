"""The groups that dynamic sampling drops."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.rollout.dynamic_sampling import equal_outcomes


@given(st.lists(st.sampled_from([0.0, 0.3, 1.0, 0.1 + 0.2]), max_size=8))
def test_a_group_is_equal_if_it_has_at_most_one_outcome(values: Any) -> None:
    assert equal_outcomes(values) == (len(set(values)) <= 1)


@pytest.mark.parametrize("value", [0.3, 0.7, 1 / 3, 1e9])
def test_equal_outcomes_are_equal_whatever_their_deviation_rounds_to(value: Any) -> None:
    assert (
        equal_outcomes([value] * 7) and equal_outcomes((value,)) and equal_outcomes([value] * 1000)
    )


def test_outcomes_are_compared_without_a_tolerance() -> None:
    assert not equal_outcomes([1.0, math.nextafter(1.0, 2.0)])
    assert equal_outcomes([0.0, -0.0]) and not equal_outcomes([math.nan, math.nan])
