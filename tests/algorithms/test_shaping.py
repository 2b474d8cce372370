"""The soft overlong punishment of DAPO."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.rollout.shaping import overlong_penalty

LIMITS = st.integers(1, 1000).flatmap(
    lambda limit: st.tuples(st.just(limit), st.integers(1, limit))
)


def reference(length: Any, max_length: Any, buffer: Any, factor: Any) -> Any:
    """Compute the paper's formula case by case, with `factor` for its punishment of 1."""
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return ((max_length - buffer) - length) / buffer * factor
    return -factor


@given(st.integers(0, 3000), LIMITS, st.floats(0, 10))
def test_the_penalty_matches_the_paper(length: Any, limits: Any, factor: Any) -> None:
    max_length, buffer = limits
    got = overlong_penalty(length, max_length=max_length, buffer=buffer, factor=factor)
    assert got == pytest.approx(reference(length, max_length, buffer, factor), rel=1e-6)
    assert -factor <= got <= 0


def test_it_falls_from_the_expected_length_to_the_limit_and_no_further() -> None:
    got = [
        overlong_penalty(n, max_length=20, buffer=4, factor=2.0)
        for n in (0, 16, 17, 18, 20, 21, 100)
    ]
    assert got == [0.0, 0.0, -0.5, -1.0, -2.0, -2.0, -2.0]
    assert math.copysign(1, got[1]) == 1, "no -0 in a reward"


@pytest.mark.parametrize(
    "changes",
    [
        {"buffer": 0},
        {"buffer": -1},
        {"buffer": 21},
        {"factor": -1.0},
        {"factor": math.nan},
        {"length": -1},
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        overlong_penalty(**({"length": 1, "max_length": 20, "buffer": 4, "factor": 1.0} | changes))
