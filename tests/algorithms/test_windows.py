"""Advantages of responses that are trained in windows: EGAE, and lambda by length."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from millrace.algorithms.advantage import AdvantageBatch, estimate
from millrace.algorithms.estimators import ESTIMATORS
from tests.algorithms.options import advantage_options

RAW = dataclasses.replace(advantage_options(), whiten=False)


def estimated(
    rows: list[tuple[list[float], float, bool]],
    lengths_so_far: list[int] | None = None,
    truncated: list[bool] | None = None,
    **keys: Any,
) -> list[float]:
    """Return the advantages of (values, score, whether the response goes on)."""
    batch = AdvantageBatch(
        scores=torch.tensor([score for _, score, _ in rows], dtype=torch.float64),
        groups=torch.arange(len(rows)),
        lengths=torch.tensor([len(v) for v, _, _ in rows]),
        values=torch.tensor([x for v, _, _ in rows for x in v], dtype=torch.float64),
        goes_on=torch.tensor([goes_on for _, _, goes_on in rows]),
        truncated=None if truncated is None else torch.tensor(truncated),
        response_lengths=None if lengths_so_far is None else torch.tensor(lengths_so_far),
    )
    found = estimate(ESTIMATORS["gae"], batch, dataclasses.replace(RAW, **keys)).tokens.tolist()
    assert isinstance(found, list)
    return found


def test_advantages_are_those_computed_by_hand() -> None:
    """gamma 0.5, lambda 0.5. The first response goes on; the second ends with score 2."""
    found = estimated([([1.0, 2.0, 4.0], 0.0, True), ([1.0, 2.0], 2.0, False)], gamma=0.5, lam=0.5)
    # deltas: 0.5 x 2 - 1 = 0, 0.5 x 4 - 2 = 0, 0.5 x 4 - 4 = -2;   0.5 x 2 - 1 = 0, 2 - 2 = 0
    assert found == pytest.approx([-0.125, -0.5, -2.0, 0.0, 0.0])


def test_a_window_and_a_response_that_the_limit_cut_both_go_on_from_their_last_value() -> None:
    rows = [([1.0, 2.0], 0.0, True), ([1.0, 2.0], 3.0, False), ([1.0, 2.0], 3.0, False)]
    keys: dict[str, Any] = {"gamma": 0.5, "lam": 0.0, "bootstrap_truncated": True}
    found = estimated(rows, truncated=[False, True, False], **keys)
    assert found == pytest.approx([0.0, -1.0, 0.0, -1.0, 0.0, 1.0])


def test_lambda_grows_with_the_length_of_the_response_and_has_a_least_value() -> None:
    rows = [([0.0, 0.0, 0.0], 1.0, False)] * 3
    found = estimated(rows, [100, 1000, 30], gamma=1.0, lam=0.9, adaptive_lam=True)
    lams = [max(1 - 1 / (0.05 * n), 0.9) for n in (100, 1000, 30)]
    assert lams == pytest.approx([0.9, 0.98, 0.9])
    assert found == pytest.approx([lam**k for lam in lams for k in (2, 1, 0)])
    found = estimated(rows, [100, 1000, 30], gamma=1.0, lam=0.0, adaptive_lam=True)
    lams = [0.8, 0.98, 1 / 3]
    assert found == pytest.approx([lam**k for lam in lams for k in (2, 1, 0)])
