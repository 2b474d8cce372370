"""KL estimators compared with NumPy (values and gradients), and the adaptive coefficient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.algorithms import kl

LOG_PROB = st.floats(-30, 0)
PAIRS = st.lists(st.tuples(LOG_PROB, LOG_PROB), max_size=30)


def k3_value(d: Any) -> Any:
    x = min(max(-d, -20.0), 20.0)
    return min(max(math.expm1(x) - x, -10.0), 10.0)


def k3_slope(d: Any) -> Any:
    return 1 - math.exp(-d) if abs(d) <= 20 and math.expm1(-d) + d <= 10 else 0.0


BASE = {
    "k1": (lambda d: d, lambda d: 1.0),
    "abs": (abs, lambda d: float(np.sign(d))),
    "k2": (lambda d: d**2 / 2, lambda d: d),
    "k3": (k3_value, k3_slope),
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def double(values: Any, **kwargs: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, **kwargs)


@pytest.mark.parametrize("name", sorted(kl.KL))
@given(rows=PAIRS)
def test_kl_estimators_match_numpy_in_value_and_gradient(name: str, rows: Any) -> None:
    new, ref = double([n for n, _ in rows], requires_grad=True), double([r for _, r in rows])
    base = name.removesuffix("+")
    value, slope = BASE[ALIASES.get(base, base)]
    if name.endswith("+"):
        slope = BASE["k2"][1]
    got = kl.KL[name](new, ref)
    got.sum().backward()
    np.testing.assert_allclose(
        got.detach().numpy(), [value(n - r) for n, r in rows], rtol=1e-6, atol=1e-12
    )
    np.testing.assert_allclose(
        new.grad.numpy(), [slope(n - r) for n, r in rows], rtol=1e-6, atol=1e-12
    )


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@given(rows=st.lists(st.tuples(LOG_PROB, LOG_PROB, LOG_PROB), max_size=30))
def test_the_weight_of_the_ratio_matches_numpy_in_value_and_gradient(name: str, rows: Any) -> None:
    new, ref, old = (double([row[i] for row in rows]) for i in range(3))
    got = kl.weighted_by_ratio(kl.KL[name], new.requires_grad_(), ref, old.requires_grad_())
    got.sum().backward()
    value, slope = BASE[name]
    rho = [math.exp(min(max(n - o, -20.0), 20.0)) for n, _, o in rows]
    rounding = 1e-12 + 1e-15 * max(rho, default=0.0)
    want = [r * value(n - f) for r, (n, f, _) in zip(rho, rows, strict=True)]
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-6, atol=rounding)
    grad = [
        r * (slope(n - f) + value(n - f) * (abs(n - o) <= 20))
        for r, (n, f, o) in zip(rho, rows, strict=True)
    ]
    np.testing.assert_allclose(new.grad.numpy(), grad, rtol=1e-6, atol=1e-9 + rounding)
    assert old.grad is None


def test_with_the_ratio_k3_is_unbiased_for_tokens_of_another_policy() -> None:
    """The mean under pi_old, and its gradient, are those of KL(pi || ref)."""
    logits = double([0.3, -0.5, 0.9], requires_grad=True)
    log_pi = logits.log_softmax(0)
    log_old, log_ref = (double(x).log_softmax(0) for x in ([0.0, 0.4, 0.1], [0.5, 0.0, 0.2]))
    estimate = (log_old.exp() * kl.weighted_by_ratio(kl.k3, log_pi, log_ref, log_old)).sum()
    exact = (log_pi.exp() * (log_pi - log_ref)).sum()
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-9)
    got, want = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (estimate, exact))
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-9)


def test_every_name_of_verl_is_there() -> None:
    bases = {"kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"}
    assert set(kl.KL) == bases | {f"{name}+" for name in bases}
    assert kl.KL["kl"] is kl.k1 and kl.KL["mse"] is kl.k2 and kl.KL["low_var_kl"] is kl.k3


def test_k3_is_clamped_and_keeps_small_differences() -> None:
    assert kl.k3(torch.tensor([-50.0]), torch.tensor([0.0])).item() == 10.0
    assert kl.k3(double([0.0]), double([1e-6])).item() == pytest.approx(5e-13, rel=1e-3)
    for name, pull in (("k3", 0.0), ("k3+", -50.0)):
        x = double([-50.0], requires_grad=True)
        kl.KL[name](x, double([0.0])).sum().backward()
        assert x.grad.item() == pull


@pytest.mark.parametrize("name", sorted(kl.KL))
def test_extreme_differences_stay_finite_in_float32_and_no_tokens_give_none(name: str) -> None:
    x = torch.tensor([0.0, -1000.0, -1000.0], requires_grad=True)
    value = kl.KL[name](x, torch.tensor([-1000.0, 0.0, -1000.0]))
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(x.grad).all()  # type: ignore[arg-type]
    assert kl.KL[name](torch.zeros(0), torch.zeros(0)).shape == (0,)


@given(
    st.floats(1e-6, 10),
    st.floats(-1, 20),
    st.floats(0.01, 10),
    st.floats(10, 1e6),
    st.integers(0, 49),
)
def test_the_coefficient_follows_the_error_clipped_to_a_fifth(
    coef: Any, value: Any, target: Any, horizon: Any, count: Any
) -> None:
    got = kl.adapt(coef, value, target, horizon, count)
    assert got == pytest.approx(
        coef * (1 + np.clip(value / target - 1, -0.2, 0.2) * count / horizon), rel=1e-12
    )
    assert got > 0


def test_what_would_ruin_the_coefficient_is_refused() -> None:
    with pytest.raises(ValueError, match="kl is nan"):
        kl.adapt(0.1, float("nan"), 0.1, 1000, 100)
    with pytest.raises(ValueError, match="over 0"):
        kl.adapt(0.1, 0.1, 0.0, 1000, 100)
    with pytest.raises(ValueError, match="too short"):
        kl.adapt(0.1, 0.1, 0.1, 100, 500)


def test_k3_is_clamped_where_its_docstring_says() -> None:
    x = torch.tensor([2.610, 2.612, -10.9999, -11.001], dtype=torch.float64, requires_grad=True)
    value = kl.k3(-x, torch.zeros_like(x))
    value.sum().backward()
    np.testing.assert_array_equal((value == 10).numpy(), [False, True, False, True])
    np.testing.assert_array_equal((x.grad != 0).numpy(), [True, False, True, False])
