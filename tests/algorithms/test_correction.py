"""Importance weights against NumPy, with bounds on the ratio itself."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.algorithms.correction import band, effective_sample_size, sequence_ratios, token_ratios, truncate

LOG_PROB = st.floats(-30, 0)
TOKENS = st.lists(st.tuples(LOG_PROB, LOG_PROB, st.integers(0, 4)), max_size=30)
WEIGHTS = st.lists(st.tuples(st.floats(0, 50), st.booleans()), max_size=20)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


@given(TOKENS)
def test_ratios_of_tokens_and_of_sequences_match_numpy(rows):
    a, b = (np.array([row[i] for row in rows], dtype=np.float64) for i in range(2))
    ids = np.array([row[2] for row in rows], dtype=np.int64)
    tokens = token_ratios(double(a).requires_grad_(), double(b))
    assert not tokens.requires_grad
    np.testing.assert_allclose(tokens.numpy(), np.exp(np.clip(a - b, -20, 20)), rtol=1e-6)
    sequences = sequence_ratios(double(a), double(b), torch.from_numpy(ids), 5)
    want = [np.exp(np.clip((a - b)[ids == i].sum(), -20, 20)) for i in range(5)]
    np.testing.assert_allclose(sequences.numpy(), want, rtol=1e-6)


def test_bounds_are_on_the_ratio_and_inclusive():
    ratios = double([0.1, 0.5, 1.0, 4.9, 5.0, 5.1, float("nan")])
    assert truncate(ratios[:6], 2.0).tolist() == [0.1, 0.5, 1.0, 2.0, 2.0, 2.0]
    weights, kept = band(ratios, 0.5, 5.0)
    assert kept.tolist() == [False, True, True, True, True, False, False]
    assert weights.tolist() == [0.0, 0.5, 1.0, 4.9, 5.0, 0.0, 0.0]


@given(WEIGHTS)
def test_effective_sample_size_matches_its_definition(rows):
    weights, mask = double([w for w, _ in rows]), torch.tensor([m for _, m in rows], dtype=torch.bool)
    kept = np.array([w for w, m in rows if m])
    got = effective_sample_size(weights, mask).item()
    if kept.sum() < 1e-3:
        assert 0 <= got <= 1 + 1e-9
    else:
        assert got == pytest.approx(1 / np.mean((kept / kept.mean()) ** 2), rel=1e-6)


def test_effective_sample_size_at_its_ends():
    assert effective_sample_size(double([2.0, 2.0, 2.0])).item() == pytest.approx(1.0)
    assert effective_sample_size(double([0.0, 0.0, 9.0, 0.0])).item() == pytest.approx(0.25)
    assert effective_sample_size(double([])).item() == 0.0
    assert effective_sample_size(double([0.0, 0.0])).item() == 0.0


def test_empty_bands_are_refused():
    with pytest.raises(ValueError, match="lower <= upper"):
        band(double([1.0]), 2.0, 1.0)
    with pytest.raises(ValueError, match="over 0"):
        truncate(double([1.0]), 0.0)
