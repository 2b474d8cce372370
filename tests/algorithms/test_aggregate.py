"""Loss aggregation matches NumPy and does not depend on how a mini-batch is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.algorithms.token_weights import token_weights
from tests.algorithms.loss_cases import aggregate

MODES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
SEQUENCES = st.lists(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), max_size=8), max_size=8)
SCALE = 7.0


def reference(sequences: Any, mode: str) -> Any:
    sums = [sum(x for x, m in s if m) for s in sequences]
    counts = [sum(m for _, m in s) for s in sequences]
    n = max(len(sequences), 1)
    return {
        "token-mean": sum(sums) / max(sum(counts), 1),
        "token-sum": sum(sums),
        "seq-mean-token-sum": sum(sums) / n,
        "seq-mean-token-mean": sum(s / max(c, 1) for s, c in zip(sums, counts, strict=True)) / n,
        "seq-mean-token-sum-norm": sum(sums) / n / SCALE,
    }[mode]


def flat(sequences: Any) -> Any:
    loss = torch.tensor([x for s in sequences for x, _ in s], dtype=torch.float64)
    mask = torch.tensor([float(m) for s in sequences for _, m in s])
    ids = torch.tensor([i for i, s in enumerate(sequences) for _ in s], dtype=torch.long)
    lengths = torch.tensor([float(sum(m for _, m in s)) for s in sequences], dtype=torch.float64)
    return (
        loss,
        mask,
        ids,
        {
            "sequence_lengths": lengths,
            "total_tokens": int(lengths.sum()),
            "total_sequences": len(sequences),
            "scale": SCALE,
        },
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lengths", [[3, 7], [16_777_217, 33_554_433]])
def test_factors_have_the_precision_of_the_loss_whatever_counts_are(
    mode: str, dtype: torch.dtype, lengths: list[int]
) -> None:
    sequences, tokens = len(lengths), sum(lengths)
    exact = {
        "token-mean": [1 / tokens] * sequences,
        "token-sum": [1.0] * sequences,
        "seq-mean-token-sum": [1 / sequences] * sequences,
        "seq-mean-token-mean": [1 / (sequences * length) for length in lengths],
        "seq-mean-token-sum-norm": [1 / (sequences * SCALE)] * sequences,
    }[mode]
    for counts in (torch.tensor(lengths), torch.tensor(lengths, dtype=torch.float64)):
        factors = token_weights(
            mode,  # type: ignore[arg-type]
            sequence_ids=torch.arange(sequences),
            sequence_lengths=counts,
            total_tokens=tokens,
            total_sequences=sequences,
            scale=SCALE,
            dtype=dtype,
        )
        assert factors.dtype == dtype
        np.testing.assert_array_equal(
            factors.numpy(), np.array(exact).astype(factors.numpy().dtype)
        )


@pytest.mark.parametrize("mode", MODES)
@given(sequences=SEQUENCES)
def test_aggregate_matches_numpy(mode: str, sequences: Any) -> None:
    loss, mask, ids, counts = flat(sequences)
    x = loss.requires_grad_()
    value = aggregate(x, mask, ids, mode, **counts)
    value.backward()
    np.testing.assert_allclose(value.item(), reference(sequences, mode), rtol=1e-6, atol=1e-9)
    assert not x.grad[mask == 0].any()
    # The value is linear in the losses, so the gradient of a loss is its weight.
    np.testing.assert_allclose(
        (x.grad * x.detach()).sum().item(), value.item(), rtol=1e-6, atol=1e-9
    )


def test_a_masked_token_may_be_infinite() -> None:
    value = aggregate(
        torch.tensor([1.0, torch.inf]),
        torch.tensor([1, 0]),
        torch.tensor([0, 0]),
        "token-mean",
        sequence_lengths=torch.tensor([1]),
        total_tokens=1,
        total_sequences=1,
        scale=1.0,
    )
    assert value.item() == 1.0


def test_unknown_modes_and_scales_are_refused() -> None:
    loss, mask, ids, counts = flat([[(1.0, True)]])
    with pytest.raises(ValueError, match="token-mean"):
        aggregate(loss, mask, ids, "mean", **counts)
    with pytest.raises(ValueError, match="scale"):
        aggregate(loss, mask, ids, "token-mean", **(counts | {"scale": 0.0}))
