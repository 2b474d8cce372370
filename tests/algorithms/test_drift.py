"""Metrics by token age, compared with NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.algorithms.drift import by_age

LOG_PROB = st.one_of(st.floats(-40, 0), st.sampled_from([-math.inf, math.nan]))
TOKENS = st.lists(st.tuples(LOG_PROB, LOG_PROB, st.integers(0, 9)), max_size=30)


def run(rows: Any, max_age: Any, dtype: Any = torch.float64) -> Any:
    a, b = (torch.tensor([row[i] for row in rows], dtype=dtype) for i in range(2))
    return by_age(a, b, torch.tensor([row[2] for row in rows], dtype=torch.long), max_age)


def reference(rows: Any, max_age: Any) -> Any:
    if not rows:
        return {"staleness/token_mean": 0.0, "staleness/token_max": 0.0}
    ages = [age for *_, age in rows]
    metrics = {"staleness/token_mean": np.mean(ages), "staleness/token_max": max(ages)}
    for bin_ in range(max_age + 1):
        mine = [row for row in rows if (row[2] >= bin_ if bin_ == max_age else row[2] == bin_)]
        name = f"{bin_}+" if bin_ == max_age else f"{bin_}"
        metrics[f"staleness/token_share/{name}"] = len(mine) / len(rows)
        if not mine:
            continue
        logs = [min(max(a - b, -20.0), 20.0) for a, b, _ in mine if math.isfinite(a - b)]
        weights = np.exp(np.array(logs, dtype=np.float64))
        metrics[f"staleness/log_ratio/{name}"] = np.mean(logs) if logs else 0.0
        metrics[f"staleness/ess/{name}"] = (
            1 / np.mean((weights / weights.mean()) ** 2) if logs else 0.0
        )
    return metrics


@given(TOKENS, st.integers(0, 10))
@settings(max_examples=100, deadline=None)
def test_metrics_match_numpy(rows: Any, max_age: Any) -> None:
    assert run(rows, max_age) == pytest.approx(reference(rows, max_age), rel=1e-6, abs=1e-12)


def test_ages_under_0_and_shapes_that_differ_are_refused() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="at least 0"):
        by_age(one, one, torch.tensor([-1]), 4)
    with pytest.raises(ValueError, match="max_age, -1"):
        by_age(one, one, torch.tensor([0]), -1)
    with pytest.raises(ValueError, match="must all be"):
        by_age(one, torch.zeros(2), torch.tensor([0]), 4)
