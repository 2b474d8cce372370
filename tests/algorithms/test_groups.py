"""Normalisation of rewards and advantages, compared with NumPy in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.algorithms.advantage import estimate
from millrace.algorithms.estimators import ESTIMATORS
from millrace.algorithms.groups import normalize
from tests.algorithms.options import advantage_options, norm_options
from tests.algorithms.test_estimators import CALM, PLAIN, ROWS, SEED, for_name, make

VALUES = st.lists(
    st.tuples(st.one_of(st.sampled_from([0.0, 0.3, 1.0]), st.floats(-5, 5)), st.integers(-1, 3)),
    max_size=20,
)
"""(value, group)."""
LEVEL = st.sampled_from(["batch", "group", None])
OPTIONS = st.builds(
    norm_options,
    mean_level=LEVEL,
    mean_leave1out=st.booleans(),
    std_level=LEVEL,
    std_unbiased=st.booleans(),
    eps=st.sampled_from([1e-5, 0.1]),
)


def tensors(rows: Any, dtype: Any = torch.float64) -> Any:
    return (
        torch.tensor([x for x, _ in rows], dtype=dtype),
        torch.tensor([g for _, g in rows], dtype=torch.long),
    )


def reference(rows: Any, o: Any) -> np.ndarray:
    """Normalise one value after the other, as AReaL's Normalization does for each of its sets."""
    x, groups = np.array([v for v, _ in rows]), [g for _, g in rows]

    def peers(i: int, level: Any) -> list[int]:
        return [j for j in range(len(x)) if level == "batch" or groups[j] == groups[i]]

    centered = x.copy()
    for i in range(len(x)):
        if o.mean_level is None:
            continue
        at = peers(i, o.mean_level)
        others = [j for j in at if j != i] if o.mean_leave1out and len(at) > 1 else at
        centered[i] = 0.0 if len(set(x[at])) < 2 else x[i] - x[others].mean()
    out = centered.copy()
    for i in range(len(x)):
        if o.std_level is not None:
            at = peers(i, o.std_level)
            count = len(at) - o.std_unbiased
            std = np.sqrt((centered[at] ** 2).sum() / count) if count else 1.0
            out[i] = centered[i] / (std + o.eps)
    return out


@given(VALUES, OPTIONS)
@settings(max_examples=200, deadline=None)
def test_normalisation_matches_numpy(rows: Any, options: Any) -> None:
    values, groups = tensors(rows)
    got = normalize(values.requires_grad_(), groups, options)
    np.testing.assert_allclose(got.numpy(), reference(rows, options), rtol=1e-9, atol=1e-9)
    assert not got.requires_grad


@pytest.mark.parametrize("level", ["batch", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_give_exactly_zero(level: Any, dtype: Any) -> None:
    values = torch.full((10,), 0.1, dtype=dtype)  # The sum of ten is not 1 in float64.
    got = normalize(values, torch.zeros(10), norm_options(mean_level=level, std_level=level))
    assert got.tolist() == [0.0] * 10 and got.dtype == dtype


def test_without_levels_it_does_nothing() -> None:
    values, groups = torch.tensor([1.0, 2.0]), torch.tensor([0, 1])
    assert not norm_options().active
    assert normalize(values, groups, norm_options()).tolist() == [1.0, 2.0]
    assert norm_options(mean_level="batch").active and norm_options(std_level="group").active


def test_shapes_that_differ_and_an_eps_of_0_are_refused() -> None:
    with pytest.raises(ValueError, match="must both be"):
        normalize(torch.ones(2), torch.zeros(3), norm_options())
    with pytest.raises(ValueError, match="eps"):
        norm_options(eps=0.0)


@pytest.mark.parametrize("name", ESTIMATORS)
@CALM
@given(rows=ROWS, seed=SEED)
def test_scores_are_normalised_before_an_estimator_and_advantages_after_it(
    name: str, rows: Any, seed: int
) -> None:
    reward = norm_options(mean_level="batch", std_level="batch")
    adv = norm_options(mean_level="group", std_level="batch", std_unbiased=False)
    batch = for_name(make(rows, seed, token_rewards=True), name)
    keep = torch.tensor(np.random.default_rng(seed).random(len(rows)) < 0.7)
    batch = dataclasses.replace(batch, keep=keep)
    own = norm_options() if name in ("gdpo", "remax") else reward
    got = estimate(ESTIMATORS[name], batch, advantage_options(reward_norm=own, adv_norm=adv))
    scores = batch.scores.masked_scatter(
        keep, normalize(batch.scores[keep], batch.groups[keep], own)
    )
    plain = estimate(ESTIMATORS[name], dataclasses.replace(batch, scores=scores), PLAIN).tokens
    at = torch.repeat_interleave(keep, batch.lengths)
    groups = torch.repeat_interleave(batch.groups, batch.lengths)
    want = plain.masked_scatter(at, normalize(plain[at], groups[at], adv))
    assert torch.equal(got.tokens, want)


@pytest.mark.parametrize("name", ["gdpo", "remax"])
def test_an_estimator_that_reads_other_rewards_refuses_reward_norm(name: str) -> None:
    batch = for_name(make([(0, 2, 1.0, False)], 0), name)
    options = advantage_options(reward_norm=norm_options(mean_level="batch"))
    with pytest.raises(ValueError, match=f"{name} cannot use reward_norm"):
        estimate(ESTIMATORS[name], batch, options)
