"""Advantages of responses that are trained in windows: EGAE, and lambda by length."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.algorithms.advantage import AdvantageBatch, estimate
from millrace.algorithms.estimators import ESTIMATORS
from tests.algorithms.options import advantage_options

RAW = dataclasses.replace(advantage_options(), whiten=False)


def estimated(
    rows: list[tuple[list[float], float, bool]],
    lengths_so_far: list[int] | None = None,
    **keys: Any,
) -> list[float]:
    """Return the advantages of (values, score, whether the response goes on)."""
    batch = AdvantageBatch(
        scores=torch.tensor([score for _, score, _ in rows], dtype=torch.float64),
        groups=torch.arange(len(rows)),
        lengths=torch.tensor([len(v) for v, _, _ in rows]),
        values=torch.tensor([x for v, _, _ in rows for x in v], dtype=torch.float64),
        goes_on=torch.tensor([goes_on for _, _, goes_on in rows]),
        response_lengths=None if lengths_so_far is None else torch.tensor(lengths_so_far),
    )
    found = estimate(ESTIMATORS["gae"], batch, dataclasses.replace(RAW, **keys)).tokens.tolist()
    assert isinstance(found, list)
    return found


values = st.lists(st.floats(-3, 3), min_size=1, max_size=9)


@given(values=values)
def test_without_discount_a_window_that_goes_on_compares_its_last_value_with_each(
    values: list[float],
) -> None:
    """At gamma = lambda = 1, A_t = V_{e-1} - V_t (T-PPO, arXiv 2506.15050, section 3)."""
    found = estimated([(values, 0.0, True)], gamma=1.0, lam=1.0)
    np.testing.assert_allclose(found, values[-1] - np.array(values), atol=1e-12)


def test_advantages_are_those_computed_by_hand() -> None:
    """gamma 0.5, lambda 0.5. The first response goes on; the second ends with score 2."""
    found = estimated([([1.0, 2.0, 4.0], 0.0, True), ([1.0, 2.0], 2.0, False)], gamma=0.5, lam=0.5)
    # deltas: 0.5 x 2 - 1 = 0, 0.5 x 4 - 2 = 0, 0.5 x 4 - 4 = -2;   0.5 x 2 - 1 = 0, 2 - 2 = 0
    assert found == pytest.approx([-0.125, -0.5, -2.0, 0.0, 0.0])


@given(values=values, cut=st.integers(1, 9), seed=st.integers(0, 99))
def test_a_window_needs_no_token_of_the_windows_before(
    values: list[float], cut: int, seed: int
) -> None:
    whole = estimated([(values, seed / 7, False)], gamma=0.9, lam=0.8)
    last = values[min(cut, len(values) - 1) :]
    np.testing.assert_allclose(
        estimated([(last, seed / 7, False)], gamma=0.9, lam=0.8), whole[-len(last) :], rtol=1e-12
    )


def test_lambda_grows_with_the_length_of_the_response_and_has_a_least_value() -> None:
    rows = [([0.0, 0.0, 0.0], 1.0, False)] * 3
    found = estimated(rows, [100, 1000, 30], gamma=1.0, lam=0.9, adaptive_lam=True)
    lams = [max(1 - 1 / (0.05 * n), 0.9) for n in (100, 1000, 30)]
    assert lams == pytest.approx([0.9, 0.98, 0.9])
    assert found == pytest.approx([lam**k for lam in lams for k in (2, 1, 0)])
    found = estimated(rows, [100, 1000, 30], gamma=1.0, lam=0.0, adaptive_lam=True)
    lams = [0.8, 0.98, 1 / 3]
    assert found == pytest.approx([lam**k for lam in lams for k in (2, 1, 0)])
