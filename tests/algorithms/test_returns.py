"""Token estimators compared with NumPy loops that follow the definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.algorithms.estimators.gae import gae
from millrace.algorithms.estimators.optimal_token_baseline import optimal_token_baseline
from millrace.algorithms.estimators.remax import remax
from millrace.algorithms.returns import discounted_sums, place_scores, whiten

LENGTHS = st.lists(st.integers(0, 9), max_size=10)
DISCOUNT = st.sampled_from([0.0, 0.5, 0.95, 1.0])
CALM = settings(deadline=None, max_examples=60)
SEED = st.integers(0, 2**32 - 1)


def split(flat: Any, lengths: Any) -> Any:
    """Split the values by trajectory."""
    return (
        np.split(np.asarray(flat, dtype=np.float64), np.cumsum(lengths)[:-1])
        if len(lengths)
        else []
    )


def flat(parts: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0), *parts])


def random(seed: int, lengths: Any, fields: Any) -> Any:
    """Return normal random values, float64 [fields, T]."""
    return np.random.default_rng(seed).normal(size=(fields, sum(lengths)))


def to_go(r: Any, gamma: Any) -> np.ndarray:
    return np.array([sum(gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))])


def close(got: Any, expected: Any) -> None:
    assert got.dtype == torch.float64 and not got.requires_grad
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-9)


def ints(x: Any) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.long)


@CALM
@given(LENGTHS, SEED, DISCOUNT)
def test_discounted_sums_match_numpy(lengths: Any, seed: int, gamma: Any) -> None:
    (r,) = random(seed, lengths, 1)
    close(
        discounted_sums(torch.tensor(r), ints(lengths), gamma),
        flat([to_go(x, gamma) for x in split(r, lengths)]),
    )


@CALM
@given(LENGTHS, SEED, st.booleans())
def test_scores_sit_on_the_last_token(lengths: Any, seed: int, with_token_rewards: Any) -> None:
    (r,) = random(seed, lengths, 1) * with_token_rewards
    scores = np.arange(1.0, len(lengths) + 1)
    parts = [x.copy() for x in split(r, lengths)]
    for x, s in zip(parts, scores, strict=True):
        x[len(x) - 1 :] += s
    given_rewards = torch.tensor(r) if with_token_rewards else None
    close(place_scores(torch.tensor(scores), ints(lengths), given_rewards), flat(parts))


def reference_gae(r: Any, v: Any, gamma: Any, lam: Any, truncated: Any) -> np.ndarray:
    """Compute A_t as the sum over later tokens, not by recursion."""
    n = len(r)
    after = np.append(v[1:], v[-1] if truncated else 0.0) if n else v
    delta = r + gamma * after - v
    return np.array(
        [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
    )


@CALM
@given(LENGTHS, SEED, DISCOUNT, DISCOUNT, st.booleans())
def test_gae_matches_numpy_and_its_targets_are_advantages_plus_values(
    lengths: Any, seed: int, gamma: Any, lam: Any, bootstrap: Any
) -> None:
    r, v = random(seed, lengths, 2)
    cut = np.random.default_rng(seed).random(len(lengths)) < 0.5
    truncated = torch.tensor(cut) if bootstrap else None
    got, targets = gae(
        torch.tensor(r), torch.tensor(v), ints(lengths), gamma=gamma, lam=lam, truncated=truncated
    )
    rows = zip(split(r, lengths), split(v, lengths), cut, strict=True)
    expected = flat([reference_gae(a, b, gamma, lam, bootstrap and c) for a, b, c in rows])
    close(got, expected)
    close(targets, expected + v)


def test_gae_without_discount_is_the_reward_to_go_less_the_value() -> None:
    lengths, r, v = (
        ints([3, 0, 2]),
        torch.tensor([0, 0, 1.0, 0, -1]),
        torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]),
    )
    got, targets = gae(r, v, lengths, gamma=1.0, lam=1.0)
    assert got.tolist() == pytest.approx([0.9, 0.8, 0.7, -1.4, -1.5])
    assert targets.tolist() == pytest.approx([1, 1, 1, -1, -1])
    one_step, _ = gae(r, v, lengths, gamma=1.0, lam=0.0)
    assert one_step.tolist() == pytest.approx([0.1, 0.1, 0.7, 0.1, -1.5])


def test_a_truncated_end_has_the_value_of_its_last_state() -> None:
    r, v = torch.zeros(4), torch.tensor([0.5, 0.8, 0.5, 0.8])
    got, targets = gae(
        r, v, ints([2, 2]), gamma=1.0, lam=1.0, truncated=torch.tensor([True, False])
    )
    assert got.tolist() == pytest.approx([0.3, 0.0, -0.5, -0.8])
    assert targets.tolist() == pytest.approx([0.8, 0.8, 0.0, 0.0])


@CALM
@given(LENGTHS, SEED)
def test_remax_is_the_reward_to_go_less_the_greedy_score(lengths: Any, seed: int) -> None:
    (r,) = random(seed, lengths, 1)
    greedy = np.arange(len(lengths)) / 4.0
    expected = flat([to_go(x, 1.0) - b for x, b in zip(split(r, lengths), greedy, strict=True)])
    close(remax(torch.tensor(r), ints(lengths), torch.tensor(greedy)), expected)


def reference_otb(
    r: Any, lengths: Any, groups: Any, log_probs: Any, squares: Any, weights: Any
) -> Any:
    parts = [split(x, lengths) for x in (r, log_probs, squares, weights)]
    g = [to_go(x, 1.0) for x in parts[0]]
    w = [
        np.cumsum((1 - 2 * np.exp(lp) + sq) * rho**2)
        for lp, sq, rho in zip(*parts[1:], strict=True)
    ]
    result = [np.zeros(n) for n in lengths]
    for i, n in enumerate(lengths):
        for t in range(n):
            peers = [j for j in range(len(lengths)) if groups[j] == groups[i] and lengths[j] > t]
            result[i][t] = g[i][t] - sum(g[j][t] * w[j][t] for j in peers) / sum(
                w[j][t] for j in peers
            )
    return flat(result)


@CALM
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-2, 1)), max_size=8), SEED, st.booleans())
def test_the_optimal_token_baseline_matches_numpy(rows: Any, seed: int, weighted: Any) -> None:
    lengths, groups = [n for n, _ in rows], [g for _, g in rows]
    r, x, y, z = random(seed, lengths, 4)
    probs = 1 / (1 + np.exp(-x))
    squares = probs**2 + (1 - probs) ** 2 / (1 + np.abs(y))
    weights = np.exp(z / 2) if weighted else np.ones_like(z)
    args = [torch.tensor(a) for a in (np.log(probs), squares)]
    got = optimal_token_baseline(  # type: ignore[call-arg]
        torch.tensor(r),
        ints(lengths),
        ints(groups),
        *args,
        torch.tensor(weights) if weighted else None,
    )
    close(got, reference_otb(r, lengths, groups, np.log(probs), squares, weights))


def otb(lengths: Any, groups: Any, scores: Any, prob: Any = 0.5) -> Any:
    t = sum(lengths)
    log_probs = torch.full((t,), prob).log()
    return optimal_token_baseline(
        place_scores(torch.tensor(scores), ints(lengths)),
        ints(lengths),
        ints(groups),
        log_probs,
        torch.full((t,), prob**2),
    )


def test_a_token_without_a_peer_at_its_position_gets_zero() -> None:
    assert otb([3], [0], [0.3]).tolist() == [0.0] * 3
    got = otb([4, 2], [0, 0], [1.0, 0.0])
    assert got.tolist() == pytest.approx([0.5, 0.5, 0.0, 0.0, -0.5, -0.5])
    assert got[2:4].tolist() == [0.0, 0.0]


@CALM
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=9),
    st.sampled_from([0.1, 0.3, 0.7]),
    st.sampled_from([0.2, 1.0]),
)
def test_equal_scores_give_an_optimal_token_baseline_of_exactly_zero(
    lengths: Any, score: Any, prob: Any
) -> None:
    assert not otb(lengths, [3] * len(lengths), [score] * len(lengths), prob).any()


def test_a_policy_that_is_sure_of_every_token_has_the_plain_mean_for_a_baseline() -> None:
    assert otb([1, 1, 1], [0, 0, 0], [1.0, 0.0, 0.5], prob=1.0).tolist() == pytest.approx(
        [0.5, -0.5, 0.0]
    )


@CALM
@given(st.lists(st.floats(-100, 100), max_size=30))
def test_whitening_matches_numpy(values: Any) -> None:
    x = np.array(values)
    flat_values = len(x) < 2 or len(set(values)) == 1
    expected = np.zeros(len(x)) if flat_values else (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)
    close(whiten(torch.tensor(x)), expected)


@CALM
@given(
    st.integers(0, 30),
    st.sampled_from([0.1, 0.3, 0.7, 1e9]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_equal_values_are_whitened_to_exactly_zero(n: Any, value: Any, dtype: Any) -> None:
    got = whiten(torch.full((n,), value, dtype=dtype))
    assert got.tolist() == [0.0] * n and got.dtype == dtype


def test_nothing_here_has_a_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    lengths = ints([2, 1])
    assert not any(a.requires_grad for a in gae(x, x, lengths, gamma=1.0, lam=1.0))
    for got in (
        whiten(x),
        discounted_sums(x, lengths, 1.0),
        remax(x, lengths, x[:2]),
        place_scores(x[:2], lengths, x),
        optimal_token_baseline(x, lengths, ints([0, 0]), -x, x, x),
    ):
        assert not got.requires_grad and got.dtype == torch.float32
