"""Tests that loss and gradient do not depend on how a mini-batch is split.

They cover every loss, aggregation and correction, in one piece on one rank, and in micro-batches on
four that share tokens. Most have a second layout of two or four ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sweeps import sweep, thorough
from tests.train import invariance_cases
from tests.train.forks import GROUP, start_ranks
from tests.train.invariance_cases import CASES, LAYOUTS, WHOLE, cases_of, few_of

pytestmark = pytest.mark.xdist_group(GROUP)


@pytest.fixture(scope="module")
def alone(folder: str) -> dict[str, dict[str, Any]]:
    """The results of one process, with the mini-batch in one piece."""
    engine = invariance_cases.engine_of(folder, 0, 1)
    return {name: invariance_cases.run_case(engine, case, WHOLE) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks(folder: str, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    start_ranks(invariance_cases.run_rank, (folder, thorough(request.config)), 4)
    return {
        layout: torch.load(f"{folder}/invariance {layout}.pt", weights_only=False)
        for layout in LAYOUTS
    }


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Compare to 1e-6 of the largest entry of each tensor.

    Smaller differences come from another order of summation.
    """
    assert got.keys() == want.keys() and got["tokens"] == want["tokens"]
    assert got["metrics"] == pytest.approx(want["metrics"], rel=1e-6, abs=1e-9)
    for name in want.keys() - {"tokens", "metrics"}:
        tensors = (
            zip(got[name], want[name], strict=True)
            if isinstance(want[name], list)
            else [(got[name], want[name])]
        )
        for a, b in tensors:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * float(b.abs().max()) + 1e-12)


POINTS = [(layout, name) for layout in LAYOUTS for name in cases_of(layout)]


@pytest.mark.parametrize(("layout", "name"), sweep(POINTS, lambda p: p[1] in few_of(p[0])))
def test_any_number_of_ranks_and_micro_batches_makes_the_same_loss_and_gradient(
    name: str, layout: str, alone: dict[str, dict[str, Any]], ranks: dict[str, dict[str, Any]]
) -> None:
    same(ranks[layout][name], alone[name])


def test_the_cases_differ_and_reject_something(alone: dict[str, dict[str, Any]]) -> None:
    """A setting without effect would also be invariant, so the losses must differ."""
    losses = {name: round(float(found["actor sums"][0]), 12) for name, found in alone.items()}
    assert 0.0 not in losses.values() and len({*losses.values()}) == len(losses), losses
    assert all(any(g.any() for g in found["actor gradients"]) for found in alone.values())
    everything = alone["vanilla, token-mean"]["tokens"]
    for name in (
        "rejection by token and by sequence",
        "rejection before the baseline",
        "rejection by the current policy",
        "second moment",
        "age",
    ):
        assert 0 < alone[name]["tokens"] < everything, name
