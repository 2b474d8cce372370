"""Log-probs and entropies in chunks, compared with full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from millrace.train.log_probs import log_probs_and_entropy, top_log_probs


def reference(hidden: Any, weight: Any, targets: Any, temperature: Any) -> Any:
    log_p = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def make(n: Any, dtype: Any = torch.float64, seed: int = 0) -> Any:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, 6, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(11, 6, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 11, (n,), generator=g)


@pytest.mark.parametrize("chunk", [0, 1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("used", ["both", "log_prob", "entropy"])
def test_values_and_gradients_match_full_logits(chunk: int, temperature: float, used: str) -> None:
    hidden, weight, targets = make(9)
    g = torch.Generator().manual_seed(1)
    a, b = (
        torch.randn(9, generator=g, dtype=torch.float64) * (used in ("both", name))
        for name in ("log_prob", "entropy")
    )

    def loss(log_prob: Any, entropy: Any) -> Any:
        parts = [(log_prob * a).sum()] * (used != "entropy") + [(entropy * b).sum()] * (
            used != "log_prob"
        )
        return sum(parts)

    want = reference(hidden, weight, targets, temperature)
    want_grads = torch.autograd.grad(loss(*want), (hidden, weight))
    got = log_probs_and_entropy(hidden, weight, targets, temperature, chunk=chunk)
    got_grads = torch.autograd.grad(loss(*got), (hidden, weight))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_grads, want_grads, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [0, 3])
def test_gradcheck(chunk: int) -> None:
    hidden, weight, targets = make(5)
    assert torch.autograd.gradcheck(
        lambda h, w: log_probs_and_entropy(h, w, targets, 0.7, chunk=chunk), (hidden, weight)
    )


def test_bfloat16_is_computed_in_float32() -> None:
    hidden, weight, targets = make(50, torch.bfloat16)
    got = log_probs_and_entropy(hidden, weight, targets, 1.0)
    assert got[0].dtype == got[1].dtype == torch.float32
    want = reference(hidden, weight, targets, 1.0)
    torch.testing.assert_close(got, tuple(w.float() for w in want), rtol=1e-5, atol=1e-5)
    (got[0] + got[1]).sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_no_tokens_stay_connected_with_a_gradient_of_zero() -> None:
    hidden, weight, targets = make(0)
    log_prob, entropy = log_probs_and_entropy(hidden, weight, targets, 1.0)
    assert log_prob.shape == entropy.shape == (0,)
    (log_prob.sum() + entropy.sum()).backward()
    assert not weight.grad.any()


def test_impossible_tokens_do_not_make_nan() -> None:
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [-torch.inf]], requires_grad=True)
    _, entropy = log_probs_and_entropy(hidden, weight, torch.tensor([0]), 1.0)
    assert entropy.item() == 0.0
    with pytest.raises(ValueError, match="temperature"):
        log_probs_and_entropy(hidden, weight, torch.tensor([0]), 0.0)


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_several_tokens_of_a_row_have_the_values_and_gradients_of_full_logits(
    chunk: int, temperature: float
) -> None:
    hidden, weight, _ = make(7)
    g = torch.Generator().manual_seed(2)
    targets = torch.randint(0, 11, (7, 4), generator=g)
    targets[:, 1] = targets[:, 0]  # the drawn token is often one of the candidates
    factors = torch.randn(7, 5, generator=g, dtype=torch.float64)

    def loss(log_probs: Any, entropy: Any) -> Any:
        return (torch.cat([log_probs, entropy[:, None]], -1) * factors).sum()

    log_p = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    want = log_p.gather(-1, targets), -(log_p.exp() * log_p).sum(-1)
    got = log_probs_and_entropy(hidden, weight, targets, temperature, chunk=chunk)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        *(torch.autograd.grad(loss(*x), (hidden, weight)) for x in (got, want)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_the_likeliest_tokens_are_those_of_full_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.train.log_probs.CHUNK_ELEMENTS", {"cpu": 30})  # 2 rows at a time
    hidden, weight, _ = make(7)
    ids, log_probs = top_log_probs(hidden, weight, 0.7, 3)
    want = torch.log_softmax(hidden @ weight.t() / 0.7, -1).topk(3)
    assert torch.equal(ids, want.indices)
    torch.testing.assert_close(log_probs, want.values.detach(), rtol=1e-12, atol=1e-12)
