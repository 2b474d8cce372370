"""Tests that loss and gradient do not depend on how a mini-batch is split.

They cover every loss, aggregation and correction, on one rank and on four that share tokens. Most
have a second layout of two or four ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.train import invariance_cases
from tests.train.forks import GROUP, start_ranks
from tests.train.invariance_cases import CASES, CUTS, LAYOUTS, cases_of

pytestmark = pytest.mark.xdist_group(GROUP)


@pytest.fixture(scope="module")
def alone(folder: str) -> dict[int, dict[str, Any]]:
    """The results of one process, by the token limit of a micro-batch."""
    engine = invariance_cases.engine_of(folder, 0, 1)
    return {
        cut: {name: invariance_cases.run_case(engine, case, cut) for name, case in CASES.items()}
        for cut in CUTS
    }


@pytest.fixture(scope="module")
def ranks(folder: str) -> dict[str, dict[str, Any]]:
    start_ranks(invariance_cases.run_rank, (folder,), 4)
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


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_of_any_size_make_the_same_loss_and_gradient(
    name: str, alone: dict[int, dict[str, Any]]
) -> None:
    whole = alone[max(CUTS)][name]
    assert float(whole["actor sums"][0]) != 0.0 and any(
        bool(g.any()) for g in whole["actor gradients"]
    )
    for cut in CUTS:
        same(alone[cut][name], whole)


@pytest.mark.parametrize(("layout", "name"), [(x, name) for x in LAYOUTS for name in cases_of(x)])
def test_any_number_of_ranks_makes_the_same_loss_and_gradient(
    name: str, layout: str, alone: dict[int, dict[str, Any]], ranks: dict[str, dict[str, Any]]
) -> None:
    same(ranks[layout][name], alone[max(CUTS)][name])


def test_the_cases_differ_and_reject_something(alone: dict[int, dict[str, Any]]) -> None:
    """A setting without effect would also be invariant, so the losses must differ."""
    whole = alone[max(CUTS)]
    losses = {name: round(float(found["actor sums"][0]), 12) for name, found in whole.items()}
    twins = {a: b for a in losses for b in losses if a < b and losses[a] == losses[b]}
    assert all(
        a.startswith("gpg") and b == a.replace("gpg", "reinforce") for a, b in twins.items()
    ), twins
    everything = whole["vanilla, token-mean"]["tokens"]
    for name in (
        "rejection by token and by sequence",
        "rejection before the baseline",
        "rejection by the current policy",
        "second moment",
        "age",
    ):
        assert 0 < whole[name]["tokens"] < everything, name
