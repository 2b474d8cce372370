from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.decode.sampling import draw, stream_keys, uniforms
from millrace.errors import MillraceError


def test_streams_are_uniform_and_uncorrelated_between_seeds_and_positions() -> None:
    table = np.stack([uniforms(stream_keys(range(200)), np.full(200, p)) for p in range(200)])
    assert table.min() >= 0 and table.max() < 1
    assert abs(table.mean() - 0.5) < 0.005
    correlations = np.corrcoef(table) - np.eye(200), np.corrcoef(table.T) - np.eye(200)
    assert all(np.abs(c).max() < 0.4 for c in correlations)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(-(2**70), 2**70), position=st.integers(0, 2**40))
def test_every_seed_and_position_has_one_number_whoever_asks_with_it(
    seed: int, position: Any
) -> None:
    alone = uniforms(stream_keys([seed]), np.array([position]))
    among = uniforms(stream_keys([1, seed, 2]), np.array([5, position, 6]))
    assert alone[0] == among[1]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from([-200.0, -30.0, 0.0, 5.0, float("-inf")]), min_size=2, max_size=40),
    st.floats(0, 1, exclude_max=True),
)
def test_a_token_without_probability_is_never_drawn(logits: Any, uniform: Any) -> None:
    values = torch.tensor([[*logits, 0.0, float("-inf")]])
    for u in (uniform, 0.0, 1 - 2.0**-52):
        token, log_prob = draw(values, torch.tensor([u], dtype=torch.float64))
        assert values[0, token[0]] > -150
        assert torch.isfinite(log_prob).all()


def test_greedy_rows_take_the_largest_logit_with_log_probs_of_temperature_one() -> None:
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    uniform = torch.full((3,), 0.9999, dtype=torch.float64)
    temperature, greedy = torch.tensor([1.0, 0.5, 1.0]), torch.tensor([True, False, False])
    tokens, log_probs = draw(logits, uniform, temperature=temperature, greedy=greedy)
    assert tokens[0] == logits[0].argmax()
    expected = torch.log_softmax(logits / temperature[:, None], -1).gather(1, tokens[:, None])[:, 0]
    assert torch.equal(log_probs, expected)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_weights_that_give_no_probabilities_are_told_as_such(broken: Any) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 3] = broken
    with pytest.raises(MillraceError, match="logits that are not finite"):
        draw(logits, torch.full((2,), 0.5, dtype=torch.float64))
