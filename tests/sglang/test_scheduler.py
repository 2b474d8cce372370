"""Draws by seed: the distribution, the seeds, top-k and top-p."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from millrace.extras.sglang.scheduler import draw, draw_truncated, uniform

SPLITMIX = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
"""The first outputs of SplitMix64 for seed 0 (Vigna's splitmix64.c)."""


def splitmix(state: int) -> int:
    """Return the output of SplitMix64 at a state, in Python's integers."""
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def test_the_numbers_are_those_of_splitmix() -> None:
    gamma = 0x9E3779B97F4A7C15
    assert [splitmix(i * gamma & (1 << 64) - 1) for i in range(3)] == SPLITMIX
    seeds, positions = torch.tensor([0, 5, (1 << 63) - 1]), torch.tensor([1, 70000, 3])

    def mixed(value: int) -> int:
        return splitmix((value * gamma - gamma) & (1 << 64) - 1)

    want = [
        ((mixed(mixed(seed) + at) >> 12) + 0.5) / 2**52
        for seed, at in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    assert uniform(seeds, positions).tolist() == want


def test_draws_have_the_distribution_and_depend_on_seed_and_position_alone() -> None:
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    count = 200_000
    seeds, positions = torch.arange(count) // 100, torch.arange(count) % 100
    drawn = draw(probs.expand(count, 5), seeds, positions)
    assert drawn.dtype == torch.int32
    shares = torch.bincount(drawn, minlength=5) / count
    error = (probs * (1 - probs) / count).sqrt()
    assert bool((((shares - probs).abs()) <= 5 * error + 1e-12).all()), shares
    order = torch.randperm(count)
    assert torch.equal(draw(probs.expand(count, 5), seeds[order], positions[order]), drawn[order])
    pairs = torch.bincount(drawn[:-1] * 5 + drawn[1:], minlength=25) / count  # neighbours
    assert float((pairs - torch.outer(probs, probs).view(-1)).abs().max()) < 0.005


def test_a_request_draws_the_same_beside_one_with_a_top_p() -> None:
    """A sum that is over 1, by rounding, cuts no tail."""
    probs = torch.rand(2000, 50, generator=torch.Generator().manual_seed(2))
    probs *= 1.2 / probs.sum(-1, keepdim=True)
    seeds, positions = torch.arange(2000), torch.full((2000,), 7)
    top_ps = torch.tensor([1.0, 0.5]).repeat(1000)
    limits = torch.full((2000,), 1 << 30), top_ps
    found = draw_truncated(probs, *limits, torch.zeros(2000), False, seeds, positions)
    alone = draw(probs, seeds, positions)
    assert torch.equal(found[::2], alone[::2])
    assert not torch.equal(found[1::2], alone[1::2])


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (3, 1.0), (50, 0.6), (4, 0.5), (50, 1.0)])
def test_top_k_and_top_p_keep_what_a_reference_keeps(top_k: int, top_p: float) -> None:
    probs = torch.rand(2000, 50, generator=torch.Generator().manual_seed(1))
    probs /= probs.sum(-1, keepdim=True)
    seeds, positions = torch.arange(2000), torch.full((2000,), 7)
    limits = torch.full((2000,), top_k), torch.full((2000,), top_p)
    found = draw_truncated(probs, *limits, torch.zeros(2000), False, seeds, positions).numpy()
    kept = 0
    for row, token in zip(probs.numpy(), found, strict=True):
        ranked = np.argsort(-row, kind="stable")
        before = np.cumsum(row[ranked]) - row[ranked]
        allowed = ranked[(before <= top_p + 1e-6) & (np.arange(50) < top_k)]
        assert token in allowed
        kept += len(allowed)
    if top_k == 50 and top_p == 1.0:
        assert (found == draw(probs, seeds, positions).numpy()).all()
    else:
        assert len(set(found.tolist())) > 5 or kept < 2000 * 50
