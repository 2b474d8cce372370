"""What a shape of ranks must have in common with the FSDP engine on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class Tolerance:
    """How far two engines in float32 may differ."""

    absolute: float = 1e-5
    """Of log-probs, entropies, gradients and weights."""
    norm: float = 1e-5
    """Of the gradient's norm and of the loss, relative."""
    metrics: float = 1e-4
    """Relative."""
    after: float = 5e-5
    """Of log-probs after optimizer steps: AdamW divides a gradient by its own size.

    So it enlarges the rounding of tiny gradients, by another factor on each kind of CPU.
    """


def check_like_plain(
    ranks: Sequence[dict[str, Any]], want: dict[str, Any], tolerance: Tolerance = Tolerance()
) -> None:
    """Check what every rank of a shape found against the results of the FSDP engine."""
    near = tolerance.absolute
    for got in ranks:
        for a, b in zip(got["tokens"], want["tokens"], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=near)
        assert got["norm"] == pytest.approx(want["norm"], rel=tolerance.norm)
        assert got["loss"] == pytest.approx(want["loss"], rel=tolerance.norm)
        assert max(got.get("gradients", {"": 0.0}).values()) <= near
        assert max(got["weights"].values()) <= near
        assert got["totals"] == want["totals"]
        rel = tolerance.metrics
        for mine, theirs in zip(got["metrics"], want["metrics"], strict=True):
            assert mine == pytest.approx(theirs, rel=rel, abs=rel / 100)
        assert got["metrics"] == ranks[0]["metrics"]
        for a, b in zip(got["after"], want["after"], strict=True):
            assert a == pytest.approx(b, abs=max(near, tolerance.after))


def check_half(
    ranks: Sequence[dict[str, Any]], half: dict[str, Any], exact: dict[str, Any]
) -> None:
    """Check a shape in bfloat16 against the FSDP engine in bfloat16 and in float32.

    The gap of bfloat16 is the mean difference between the FSDP engine's log-probs in both. Tensor
    parallelism rounds the parts of a sum too, so a shape may be twice as far away.
    """

    def gap(a: dict[str, Any], b: dict[str, Any]) -> float:
        return float((a["tokens"][0] - b["tokens"][0]).abs().mean())

    for got in ranks:
        allowed = 2 * gap(half, exact)
        assert 0 < gap(got, exact) <= allowed, f"{gap(got, exact)} to float32, allowed {allowed}"
        assert gap(got, half) <= allowed, f"{gap(got, half)} to the FSDP engine, allowed {allowed}"
        assert got["norm"] == pytest.approx(half["norm"], rel=0.03)
        assert got["loss"] == pytest.approx(half["loss"], rel=0.03)
        assert got["metrics"] == ranks[0]["metrics"] and got["totals"] == half["totals"]
        after = [
            torch.tensor([x for row in side["after"] for x in row]) for side in (got, half, exact)
        ]
        moved, own = (float((mean - after[2]).abs().mean()) for mean in after[:2])
        assert moved <= 2 * max(own, allowed), f"{moved} after the steps, the FSDP engine {own}"
