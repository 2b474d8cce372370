"""PPO-clip and the KL estimators against NumPy in float64, values and gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.algorithms import kl
from millrace.algorithms.losses import ppo_clip

LOG_PROB = st.floats(-30, 0)
TOKENS = st.lists(st.tuples(LOG_PROB, LOG_PROB, st.floats(-4, 4), st.floats(0, 3)), max_size=30)
PAIRS = st.lists(st.tuples(LOG_PROB, LOG_PROB), max_size=30)


def double(values, **kwargs):
    return torch.tensor(values, dtype=torch.float64, **kwargs)


def columns(rows, width):
    return [np.array([row[i] for row in rows], dtype=np.float64) for i in range(width)]


def ppo_reference(new, old, adv, weights, low, high, c):
    """(loss, d loss / d new, clipped, clipped_lower), token by token, branch by branch."""
    out = []
    for n, o, a, w in zip(new, old, adv, weights, strict=True):
        ratio = np.exp(np.clip(n - o, -20, 20))
        slope = ratio if abs(n - o) < 20 else 0.0
        plain, bounded = -a * ratio, -a * np.clip(ratio, 1 - low, 1 + high)
        loss, grad = (bounded, 0.0) if bounded > plain else (plain, -a * slope)
        lower = a < 0 and loss > -a * c
        if lower:
            loss, grad = -a * c, 0.0
        out.append((loss * w, grad * w, float(bounded > plain), float(lower)))
    return np.array(out).reshape(-1, 4).T


@given(TOKENS, st.sampled_from([(0.2, 0.2, 3.0), (0.2, 0.28, 3.0), (0.1, 0.5, 1.2)]))
def test_ppo_clip_matches_numpy_in_value_gradient_and_statistics(rows, bounds):
    new, old, adv, weights = columns(rows, 4)
    low, high, c = bounds
    x = double(new, requires_grad=True)
    loss, stats = ppo_clip(x, double(old), double(adv), clip_low=low, clip_high=high, clip_c=c, weights=double(weights))
    loss.sum().backward()
    want, grad, clipped, lower = ppo_reference(new, old, adv, weights, low, high, c)
    np.testing.assert_allclose(loss.detach().numpy(), want, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(x.grad.numpy(), grad, rtol=1e-6, atol=1e-12)
    assert stats["clipped"].tolist() == clipped.tolist()
    assert stats["clipped_lower"].tolist() == lower.tolist()
    assert not any(value.requires_grad for value in stats.values())


def test_ratios_beyond_float32_stay_finite():
    x = torch.tensor([0.0, -1000.0], requires_grad=True)
    loss, stats = ppo_clip(x, torch.tensor([-1000.0, 0.0]), torch.tensor([-1.0, -1.0]), clip_low=0.2, clip_high=0.2, clip_c=3.0)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(x.grad).all()
    assert stats["log_ratio"].tolist() == [20.0, -20.0]
    assert loss[0].item() == 3.0


def test_a_dual_clip_of_one_is_refused():
    with pytest.raises(ValueError, match="clip_c"):
        ppo_clip(torch.zeros(1), torch.zeros(1), torch.zeros(1), clip_low=0.2, clip_high=0.2, clip_c=1.0)


KL_REFERENCE = {
    "k1": (lambda d: d, lambda d: np.ones_like(d)),
    "abs": (np.abs, np.sign),
    "k2": (lambda d: d**2 / 2, lambda d: d),
    "k3": (
        lambda d: np.clip(np.exp(np.clip(-d, -20, 20)) + np.clip(d, -20, 20) - 1, -10, 10),
        lambda d: np.where((np.abs(d) < 20) & (np.exp(np.clip(-d, -20, 20)) + d - 1 < 10), 1 - np.exp(np.clip(-d, -20, 20)), 0),
    ),
}


@pytest.mark.parametrize("name", KL_REFERENCE)
@given(rows=PAIRS)
def test_kl_estimators_match_numpy_in_value_and_gradient(name, rows):
    new, ref = columns(rows, 2)
    x = double(new, requires_grad=True)
    value = kl.KL[name](x, double(ref))
    value.sum().backward()
    want, grad = KL_REFERENCE[name]
    np.testing.assert_allclose(value.detach().numpy(), want(new - ref), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(x.grad.numpy(), grad(new - ref), rtol=1e-6, atol=1e-9)


def test_k3_is_clamped_and_keeps_small_differences():
    assert kl.k3(torch.tensor([-50.0]), torch.tensor([0.0])).item() == 10.0
    assert kl.k3(double([0.0]), double([1e-6])).item() == pytest.approx(5e-13, rel=1e-3)
    assert kl.KL["kl"] is kl.k1 and kl.KL["mse"] is kl.k2 and kl.KL["low_var_kl"] is kl.k3
