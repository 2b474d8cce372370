"""The value loss compared with NumPy in float64: value and gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.algorithms.value_loss import value_loss

VALUE = st.floats(-5, 5)
TOKENS = st.lists(st.tuples(VALUE, VALUE, VALUE), max_size=30)


def double(values: Any, **kwargs: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, **kwargs)


def huber(error: Any, delta: Any) -> Any:
    size = abs(error)
    return error**2 / 2 if delta is None or size <= delta else delta * (size - delta / 2)


def reference(v: Any, old: Any, target: Any, c: Any, delta: Any) -> Any:
    near = min(max(v, old - c), old + c)
    plain, bounded = huber(v - target, delta), huber(near - target, delta)
    slope = v - target if delta is None else min(max(v - target, -delta), delta)
    return (bounded, 0.0, 1.0) if bounded > plain else (plain, slope, 0.0)


@given(TOKENS, st.sampled_from([0.1, 0.5, 2.0]), st.sampled_from([None, 0.3, 4.0]))
def test_value_loss_matches_numpy_in_value_gradient_and_statistics(
    rows: Any, c: Any, delta: Any
) -> None:
    v = double([row[0] for row in rows], requires_grad=True)
    old, target = (double([row[i] for row in rows]).requires_grad_() for i in (1, 2))
    loss, stats = value_loss(v, old, target, cliprange=c, huber_delta=delta)
    loss.sum().backward()
    want = np.array([reference(*row, c, delta) for row in rows]).reshape(-1, 3).T  # type: ignore[call-arg]
    np.testing.assert_allclose(loss.detach().numpy(), want[0], rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(v.grad.numpy(), want[1], rtol=1e-6, atol=1e-12)
    assert stats["clipped"].tolist() == want[2].tolist() and not stats["clipped"].requires_grad
    assert old.grad is None and target.grad is None


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_a_value_on_the_edge_is_inside_and_one_beyond_has_no_gradient_towards_its_return(
    side: float,
) -> None:
    for v, grad, clipped in ((0.5, 0.5 - 3.0, 0.0), (0.75, 0.75 - 3.0, 1.0)):
        x = double([side * v], requires_grad=True)
        # The return is further out, so the clipped loss is the larger one.
        loss, stats = value_loss(
            x, double([0.0]), double([side * 3.0]), cliprange=0.5, huber_delta=None
        )
        loss.sum().backward()
        assert stats["clipped"].item() == clipped
        assert x.grad.item() == (0.0 if clipped else side * grad)
        assert loss.item() == 0.5 * 2.5**2


def test_no_tokens_give_none_and_an_empty_range_is_refused() -> None:
    loss, stats = value_loss(
        double([], requires_grad=True), double([]), double([]), cliprange=0.5, huber_delta=None
    )
    loss.sum().backward()
    assert loss.shape == stats["clipped"].shape == (0,)
    with pytest.raises(ValueError, match="cliprange"):
        value_loss(double([0.0]), double([0.0]), double([0.0]), cliprange=0.0, huber_delta=None)
    with pytest.raises(ValueError, match="huber_delta"):
        value_loss(double([0.0]), double([0.0]), double([0.0]), cliprange=0.5, huber_delta=0.0)
