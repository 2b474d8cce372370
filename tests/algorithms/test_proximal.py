"""The interpolated proximal policy, and decoupled PPO made of existing parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.algorithms.losses import POLICY_LOSSES
from millrace.algorithms.policy_loss import LossInput
from millrace.algorithms.proximal import ESTIMATES, interpolate, interpolate_linear
from tests.algorithms.options import loss_options

LOG_PROB = st.floats(-30, 0)
TOKENS = st.lists(st.tuples(LOG_PROB, LOG_PROB, st.integers(0, 12)), max_size=30)


def double(values: Any, **kwargs: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, **kwargs)


def columns(rows: Any) -> Any:
    return (
        double([r[0] for r in rows]),
        double([r[1] for r in rows]),
        torch.tensor([r[2] for r in rows], dtype=torch.long),
    )


@given(TOKENS)
def test_interpolate_matches_the_share_of_versions_gone(rows: Any) -> None:
    mu, theta, ages = columns(rows)
    got = interpolate(mu, theta.requires_grad_(), ages)
    # The live version is v_prox = v_mu + age; the next version is v_theta = v_prox + 1.
    want = [m + d / (d + 1) * (t - m) for m, t, d in rows]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-12)
    assert not got.requires_grad


@given(TOKENS)
def test_interpolate_linear_mixes_probabilities(rows: Any) -> None:
    mu, theta, ages = columns(rows)
    got = interpolate_linear(mu, theta.requires_grad_(), ages)
    want = [np.log((np.exp(m) + d * np.exp(t)) / (d + 1)) for m, t, d in rows]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-12)
    assert not got.requires_grad
    # The arithmetic mean is never below the geometric one.
    assert (got >= interpolate(mu, theta, ages) - 1e-12).all()


@pytest.mark.parametrize("estimate", ESTIMATES.values())
def test_tokens_of_any_probability_have_a_finite_estimate(estimate: Any) -> None:
    far = torch.tensor([0.0, -1e4, -1e4], dtype=torch.float32)
    for ages in ([0, 0, 0], [1, 1, 1], [1000, 1000, 1000]):
        got = estimate(far, far.flip(0), torch.tensor(ages))
        assert torch.isfinite(got).all() and got.dtype == torch.float32
        if not any(ages):
            assert torch.equal(got, far)


def test_extreme_rollout_log_probs_stay_what_they_are() -> None:
    mu, theta = double([-math.inf, -1.0]), double([-1.0, -1.0])
    for estimate in ESTIMATES.values():
        assert estimate(mu, theta, torch.tensor([0, 0])).tolist() == mu.tolist()
    assert interpolate(mu, theta, torch.tensor([2, 2])).tolist() == mu.tolist()


def test_a_token_of_the_live_version_was_drawn_by_the_proximal_policy() -> None:
    got = interpolate(double([-1.0] * 4), double([-2.0] * 4), torch.tensor([0, 1, 3, -2]))
    assert got.tolist() == [-1.0, -1.5, -1.75, -1.0]  # no version is newer than the live one
    for estimate in ESTIMATES.values():
        assert estimate(double([]), double([]), torch.zeros(0, dtype=torch.long)).shape == (0,)


def weighed(theta: Any, prox: Any, advantages: Any, mu: Any) -> Any:
    """Return PPO's losses against the proximal policy, times proximal over rollout."""
    inputs = LossInput(
        log_probs=theta,
        old_log_probs=prox,
        advantages=advantages,
        sequence_ids=torch.zeros(len(theta), dtype=torch.long),
        num_sequences=1,
        mask=torch.ones(len(theta), dtype=torch.bool),
    )
    loss, stats = POLICY_LOSSES["vanilla"](inputs, loss_options())
    return loss * (prox - mu).exp().detach(), stats


def test_dtype_is_that_of_the_policy_under_training() -> None:
    got = interpolate(double([-1.0]), torch.tensor([-2.0]), torch.tensor([1]))
    assert got.dtype == torch.float32 and got.item() == -1.5


@given(
    st.lists(
        st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2)),
        max_size=20,
    )
)
def test_decoupled_ppo_is_ppo_against_the_proximal_policy_weighed_by_proximal_over_rollout(
    rows: Any,
) -> None:
    theta, prox, mu, adv = (double([r[i] for r in rows]) for i in range(4))
    x = theta.requires_grad_()
    loss, _ = weighed(x, prox, adv, mu)
    loss.sum().backward()
    for i, (t, p, m, a) in enumerate(rows):
        # AReaL, arXiv 2505.24298: (pi_prox / mu) times the clipped surrogate of pi / pi_prox.
        r, w = np.exp(t - p), np.exp(p - m)
        plain, bounded = -a * r, -a * np.clip(r, 0.8, 1.2)
        want, slope = (bounded, 0.0) if bounded > plain else (plain, plain)
        if a < 0 and want > -3 * a:
            want, slope = -3 * a, 0.0
        assert loss[i].item() == pytest.approx(w * want, rel=1e-6, abs=1e-9)
        assert x.grad[i].item() == pytest.approx(w * slope, rel=1e-6, abs=1e-9)  # type: ignore[index]
