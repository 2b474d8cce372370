"""The selection of tokens by entropy, compared with NumPy's quantile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.algorithms.token_weights import high_entropy

ENTROPY = st.one_of(st.floats(0, 10), st.sampled_from([0.0, 1.0]))
TOKENS = st.lists(st.tuples(ENTROPY, st.booleans()), max_size=40)
SHARES = st.one_of(st.sampled_from([0.2, 0.9, 1.0]), st.floats(0.01, 1.0))


@given(TOKENS, SHARES)
def test_marked_tokens_are_at_or_above_the_quantile(rows: Any, share: float) -> None:
    entropies = torch.tensor([e for e, _ in rows], dtype=torch.float64)
    mask = torch.tensor([m for _, m in rows], dtype=torch.bool)
    got = high_entropy(entropies, mask, share=share).numpy()
    trained = entropies[mask].numpy()
    if not len(trained):
        assert not got.any()
        return
    bound = np.quantile(trained, 1 - share)
    # Rounding may move the interpolated bound by a little past a token.
    sure = np.abs(entropies.numpy() - bound) > 1e-6
    want = mask.numpy() & (entropies.numpy() >= bound)
    assert (got == want)[sure].all()
    assert got.sum() >= share * (len(trained) - 1)


def test_a_fifth_of_eleven_tokens_is_the_largest_three_and_equal_ones_go_together() -> None:
    everywhere = torch.ones(11, dtype=torch.bool)
    rising = torch.arange(11, dtype=torch.float32)
    assert high_entropy(rising, everywhere, share=0.2).tolist() == [False] * 8 + [True] * 3
    assert high_entropy(torch.ones(11), everywhere, share=0.2).all()
    assert high_entropy(rising, everywhere, share=1.0).all()
    first = high_entropy(rising, rising < 6, share=0.2)
    assert first.nonzero().flatten().tolist() == [4, 5]


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        high_entropy(torch.ones(2), torch.ones(2, dtype=torch.bool), share=share)
