"""Teachers' signals, compared with whole distributions in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.algorithms.conformance import check_signal
from millrace.algorithms.distillation import divergence, k1

SIZE = 9


def distributions(seed: int, rows: int = 4, sharpness: float = 2.0) -> Any:
    """Return log-probs, each of at least 1e-5: `1 - sum` keeps ten digits of the other tokens."""
    z = torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((sharpness * z).softmax(-1) * (1 - SIZE * 1e-5) + 1e-5).log()


def plain(log_p: Any, log_q: Any) -> Any:
    p, q = np.exp(log_p.detach().numpy()), np.exp(log_q.detach().numpy())
    return (p * np.log(p / q)).sum(-1)


@pytest.mark.parametrize("forward", [True, False])
@given(seed=st.integers(0, 10_000), sharpness=st.floats(0.1, 8), k=st.integers(1, SIZE))
def test_a_divergence_of_likeliest_tokens_is_one_between_distributions(
    forward: bool, seed: int, sharpness: float, k: int
) -> None:
    policy, teacher = distributions(seed, sharpness=sharpness), distributions(seed + 1)
    whole = plain(teacher, policy) if forward else plain(policy, teacher)
    top, ids = teacher.topk(k)
    found = divergence(policy.gather(-1, ids), top, forward=forward).numpy()
    if k == SIZE:
        np.testing.assert_allclose(found, whole, rtol=1e-9, atol=1e-12)
    else:
        classes = [
            torch.cat(
                [x.gather(-1, ids), (1 - x.gather(-1, ids).exp().sum(-1, keepdim=True)).log()], -1
            )
            for x in ((teacher, policy) if forward else (policy, teacher))
        ]
        np.testing.assert_allclose(found, plain(*classes), rtol=1e-6, atol=1e-9)
        assert (found <= whole + 1e-9).all()
    assert (found > -1e-9).all()
    assert divergence(top, top, forward=forward).abs().max() < 1e-12


@pytest.mark.parametrize("forward", [True, False])
def test_its_gradient_is_that_of_the_whole_distribution(forward: bool) -> None:
    logits = distributions(3).requires_grad_()
    teacher = distributions(4)
    own = divergence(logits.log_softmax(-1), teacher, forward=forward).sum()
    (found,) = torch.autograd.grad(own, logits)
    p, q = logits.softmax(-1), teacher.exp()
    if forward:
        want = p - q
    else:
        gap = logits.log_softmax(-1) - teacher
        want = p * (gap - (p * gap).sum(-1, keepdim=True))
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)


def test_tokens_of_no_probability_stay_finite() -> None:
    policy = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    for forward in (True, False):
        found = divergence(policy, torch.tensor([[0.0, -1e3]]), forward=forward)
        found.sum().backward()
        assert found.isfinite().all() and policy.grad is not None and policy.grad.isfinite().all()


@given(seed=st.integers(0, 10_000), weights=st.tuples(st.floats(0.1, 2), st.floats(0.1, 2)))
def test_the_signal_of_drawn_tokens_has_the_gradient_of_the_reverse_kl(
    seed: int, weights: tuple[float, float]
) -> None:
    """The expectation over all tokens, each weighted by its probability, is exact."""
    logits = distributions(seed, rows=1)[0].requires_grad_()
    teachers = distributions(seed + 1, rows=2)
    log_p = logits.log_softmax(-1)
    signal = weights[0] * k1(log_p, teachers[0]) + weights[1] * k1(log_p, teachers[1])
    assert not signal.requires_grad
    surrogate = -(log_p.detach().exp() * signal * log_p).sum()
    kl = sum(w * (log_p.exp() * (log_p - t)).sum() for w, t in zip(weights, teachers, strict=True))
    (found,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
    (want,) = torch.autograd.grad(kl, logits)
    torch.testing.assert_close(found, want, rtol=1e-8, atol=1e-10)


def test_a_signal_is_limited_also_for_an_impossible_token() -> None:
    log_p, teacher = torch.tensor([-1.0, -30.0, -1.0]), torch.tensor([-torch.inf, -0.1, -2.0])
    found = k1(log_p, teacher, limit=10.0)
    assert found.tolist() == [-10.0, 10.0, -1.0]


@pytest.mark.parametrize(
    ("signal", "rule"),
    [
        (lambda own, teacher: teacher - own, ""),
        (lambda own, teacher: (teacher - own).mean(), "return a finite number for each drawn"),
        (lambda own, teacher: (teacher - own) / 0, "returned a number that is not finite"),
        (lambda own, teacher: teacher.sub_(own), "changes its input"),
        (lambda own: own, "TypeError"),
    ],
    ids=["good", "a mean", "infinite", "in place", "one parameter"],
)
def test_a_signal_of_a_user_is_tried(signal: Any, rule: str) -> None:
    found = check_signal("f", signal)
    assert (found is None) == (not rule)
    assert found is None or rule in str(found)
