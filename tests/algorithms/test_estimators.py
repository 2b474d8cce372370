"""`estimate` compared with NumPy for each estimator, and properties that all estimators share."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.algorithms.advantage import AdvantageBatch, AdvantageOptions, Advantages, estimate
from millrace.algorithms.estimators import ESTIMATORS
from tests.algorithms.options import advantage_options, norm_options

ROWS = st.lists(
    st.tuples(
        st.integers(-2, 3),
        st.integers(0, 5),
        st.sampled_from([0.0, 1.0, -1.0, 0.3, 0.7]),
        st.booleans(),
    ),
    max_size=12,
)
"""(group, length, score, truncated by the length limit)."""
CALM = settings(deadline=None, max_examples=25)
SEED = st.integers(0, 2**32 - 1)
RELATIVE = [
    "grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "gpg",
    "gdpo",
    "reinforce_plus_plus_baseline",
    "optimal_token_baseline",
]
PLAIN = advantage_options()


def make(rows: Any, seed: int, token_rewards: Any = False) -> AdvantageBatch:
    rng = np.random.default_rng(seed)
    n, t = len(rows), sum(length for _, length, _, _ in rows)
    probs = rng.uniform(0.05, 0.95, t)
    return AdvantageBatch(
        scores=torch.tensor([s for _, _, s, _ in rows], dtype=torch.float64),
        groups=torch.tensor([g for g, _, _, _ in rows], dtype=torch.long),
        lengths=torch.tensor([x for _, x, _, _ in rows], dtype=torch.long),
        # Sums of multiples of 1/8 are exact, so both sides agree on which s_i are equal.
        token_rewards=torch.tensor(rng.integers(-2, 3, t) / 8) if token_rewards else None,
        components={
            "a": torch.tensor(rng.integers(0, 2, n) * 0.3),
            "b": torch.tensor(rng.integers(0, 3, n) * 0.7),
        },
        values=torch.tensor(rng.normal(size=t)),
        truncated=torch.tensor([c for _, _, _, c in rows], dtype=torch.bool),
        greedy_scores=torch.tensor(rng.normal(size=n)),
        log_probs=torch.tensor(np.log(probs)),
        sum_pi_squared=torch.tensor(probs**2 + (1 - probs) ** 2 / 3),
        weights=torch.tensor(rng.uniform(0.5, 2, t)),
    )


def for_name(batch: Any, name: str) -> Any:
    return dataclasses.replace(batch, token_rewards=None) if name == "gdpo" else batch


class Reference:
    """The estimators computed one trajectory at a time, in lists."""

    def __init__(self, batch: Any, options: Any) -> None:
        self.o = options
        self.n = [int(x) for x in batch.lengths]
        self.g = [int(x) for x in batch.groups]
        self.score = [float(x) for x in batch.scores]
        self.kl = self.split(
            torch.zeros(sum(self.n)) if batch.token_rewards is None else batch.token_rewards
        )
        self.s = np.array([a + sum(b) for a, b in zip(self.score, self.kl, strict=True)])
        self.r = [b.copy() for b in self.kl]
        for r, s, cut in zip(self.r, self.score, batch.truncated.tolist(), strict=True):
            r[len(r) - 1 :] += 0.0 if cut and options.bootstrap_truncated else s
        self.b = batch

    def split(self, x: Any) -> Any:
        return np.split(x.double().numpy(), np.cumsum(self.n)[:-1]) if self.n else []

    def to_go(self, gamma: Any = 1.0) -> Any:
        return [
            np.array(
                [sum(gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))]
            )
            for r in self.r
        ]

    def relative(self, s: Any, function: Any) -> Any:
        out = np.zeros(len(s))
        for g in set(self.g):
            at = [i for i, x in enumerate(self.g) if x == g]
            if len(set(s[at].tolist())) > 1:
                out[at] = function(s[at], np.array(self.n)[at])
        return out

    def scaled(self, s: Any) -> Any:
        return self.relative(
            s,
            lambda r, _: (r - r.mean()) / (r.std(ddof=1) + self.o.eps if self.o.norm_by_std else 1),
        )

    def tokens(self, scalars: Any) -> Any:
        return np.repeat(scalars, self.n)

    @staticmethod
    def flat(parts: Any) -> np.ndarray:
        return np.concatenate([np.zeros(0), *parts])

    def whiten(self, x: Any) -> Any:
        if not self.o.whiten:
            return x
        if len(set(x.tolist())) < 2:
            return np.zeros(len(x))
        return (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)

    def grpo(self) -> Any:
        return self.tokens(self.scaled(self.s))

    def grpo_passk(self) -> Any:
        def gap(r: Any, _: Any) -> np.ndarray:
            low, high = np.sort(r)[-2:]
            return np.where(
                r == high,
                (high - low) / (r.std(ddof=1) + self.o.eps if self.o.norm_by_std else 1),
                0.0,
            )

        return self.tokens(self.relative(self.s, gap))

    def rloo(self) -> Any:
        return self.tokens(
            self.relative(self.s, lambda r, _: (r - r.mean()) * len(r) / (len(r) - 1))
        )

    def opo(self) -> Any:
        return self.tokens(
            self.relative(self.s, lambda r, n: r - (r * n).sum() / n.sum() if n.sum() else 0 * r)
        )

    def gpg(self) -> Any:
        centered = self.relative(self.s, lambda r, _: r - r.mean())
        valid = self.relative(self.s, lambda r, _: np.ones(len(r))).sum()
        std = self.relative(self.s, lambda r, _: r - r + r.std(ddof=1)) + self.o.eps
        f_norm = std if self.o.f_norm == "std" else self.o.f_norm
        return self.tokens(centered * len(self.s) / max(valid, 1) / f_norm)

    def gdpo(self) -> Any:
        w = self.o.component_weights or {}
        parts = [w.get(k, 1.0) * self.scaled(x.numpy()) for k, x in self.b.components.items()]
        return self.whiten(self.tokens(sum(parts)))

    def reinforce_plus_plus(self) -> Any:
        return self.whiten(self.flat(self.to_go(self.o.gamma)))

    def reinforce_plus_plus_baseline(self) -> Any:
        return self.whiten(self.tokens(self.relative(self.s, lambda r, _: r - r.mean())))

    def raw_gae(self) -> Any:
        out = []
        for r, v, cut in zip(
            self.r, self.split(self.b.values), self.b.truncated.tolist(), strict=True
        ):
            a, last, after = (
                np.zeros(len(r)),
                0.0,
                (v[-1] if cut and self.o.bootstrap_truncated else 0.0) if len(v) else 0.0,
            )
            for t in reversed(range(len(r))):
                last = r[t] + self.o.gamma * after - v[t] + self.o.gamma * self.o.lam * last
                a[t], after = last, v[t]
            out.append(a)
        return self.flat(out)

    def gae(self) -> Any:
        return self.whiten(self.raw_gae())

    def remax(self) -> Any:
        return self.flat(self.to_go()) - self.tokens(self.b.greedy_scores.numpy())

    def optimal_token_baseline(self) -> Any:
        g, fields = self.to_go(), (self.b.log_probs, self.b.sum_pi_squared, self.b.weights)
        w = [
            np.cumsum((1 - 2 * np.exp(a) + b) * c**2)
            for a, b, c in zip(*map(self.split, fields), strict=True)
        ]
        out = [np.zeros(n) for n in self.n]
        for i, n in enumerate(self.n):
            for t in range(n):
                peers = [j for j, m in enumerate(self.n) if m > t and self.g[j] == self.g[i]]
                out[i][t] = g[i][t] - sum(g[j][t] * w[j][t] for j in peers) / sum(
                    w[j][t] for j in peers
                )
        return self.flat(out)


OPTIONS = st.builds(
    AdvantageOptions,
    norm_by_std=st.booleans(),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    component_weights=st.sampled_from([None, {"a": 2.0}, {"a": -1.0, "b": 0.5}]),
    bootstrap_truncated=st.booleans(),
    whiten=st.booleans(),
    eps=st.sampled_from([1e-6, 0.1]),
    f_norm=st.sampled_from([1.0, 2.0, "std"]),
    reward_norm=st.just(norm_options()),
    adv_norm=st.just(norm_options()),
)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if hasattr(Reference, name)])
@CALM
@given(rows=ROWS, seed=SEED, options=OPTIONS, token_rewards=st.booleans())
def test_estimates_match_numpy(
    name: str, rows: Any, seed: int, options: Any, token_rewards: Any
) -> None:
    if name != "gae":
        options = dataclasses.replace(options, bootstrap_truncated=False)
    batch = for_name(make(rows, seed, token_rewards), name)
    got, expected = estimate(ESTIMATORS[name], batch, options), Reference(batch, options)
    np.testing.assert_allclose(got.tokens.numpy(), getattr(expected, name)(), rtol=1e-6, atol=1e-7)
    assert got.tokens.dtype == torch.float64 and not got.tokens.requires_grad
    if name == "gae":
        np.testing.assert_allclose(
            got.returns.numpy(), expected.raw_gae() + batch.values.numpy(), rtol=1e-6, atol=1e-7
        )
    else:
        assert got.returns is None


def pick(batch: Any, trajectories: Any, tokens: Any) -> Any:
    """Return the batch of these trajectories and tokens, given by index or by mask."""
    return dataclasses.replace(
        batch,
        **{
            k: x[trajectories]
            for k, x in batch.per_trajectory().items()
            if x is not None and "components" not in k
        },
        **{k: x[tokens] for k, x in batch.per_token().items() if x is not None},
        components={k: x[trajectories] for k, x in batch.components.items()},
    )


@pytest.mark.parametrize("name", ESTIMATORS)
@CALM
@given(rows=ROWS, seed=SEED)
def test_what_is_not_kept_is_as_if_it_were_not_there(name: str, rows: Any, seed: int) -> None:
    batch = for_name(make(rows, seed, token_rewards=True), name)
    keep = torch.tensor(np.random.default_rng(seed).random(len(rows)) < 0.6)
    tokens = torch.repeat_interleave(keep, batch.lengths)
    nan = torch.where(keep, batch.scores, torch.nan)
    got = estimate(ESTIMATORS[name], dataclasses.replace(batch, keep=keep, scores=nan), PLAIN)
    alone = estimate(ESTIMATORS[name], pick(batch, keep, tokens), PLAIN)
    assert torch.equal(got.tokens[tokens], alone.tokens) and not got.tokens[~tokens].any()
    if alone.returns is not None:
        assert torch.equal(got.returns[tokens], alone.returns) and not got.returns[~tokens].any()  # type: ignore[index]


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_of_equal_rewards_give_exactly_zero(name: str, dtype: torch.dtype) -> None:
    rows = [(4, 3, 0.3, False)] * 7 + [(9, 2, 0.7, False)]
    batch = make(rows, 0)
    batch = dataclasses.replace(
        batch,
        scores=batch.scores.to(dtype),
        components={"a": batch.scores.to(dtype), "b": -batch.scores.to(dtype)},
    )
    assert estimate(ESTIMATORS[name], batch, PLAIN).tokens.tolist() == [0.0] * 23


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg"])
def test_a_group_has_no_variance_where_scores_and_token_rewards_add_up_to_the_same(
    name: str,
) -> None:
    batch = AdvantageBatch(
        scores=torch.tensor([1.0, 0.5, 0.0, 0.25]),
        groups=torch.tensor([0, 0, 1, 1]),
        lengths=torch.tensor([2, 1, 1, 0]),
        token_rewards=torch.tensor([-0.25, -0.25, 0.0, 0.25]),
    )
    assert estimate(ESTIMATORS[name], batch, PLAIN).tokens.tolist() == [0.0] * 4
    assert estimate(
        ESTIMATORS[name], dataclasses.replace(batch, token_rewards=None), PLAIN
    ).tokens.any()


def test_a_trajectory_without_tokens_takes_part_in_the_mean_of_its_group() -> None:
    batch = AdvantageBatch(
        scores=torch.tensor([1.0, 0.0]), groups=torch.tensor([5, 5]), lengths=torch.tensor([2, 0])
    )
    assert estimate(
        ESTIMATORS["grpo"], batch, advantage_options(norm_by_std=False)
    ).tokens.tolist() == [0.5, 0.5]
    assert estimate(ESTIMATORS["rloo"], batch, PLAIN).tokens.tolist() == [1.0, 1.0]


def test_the_score_of_a_truncated_trajectory_does_not_count_when_its_value_does() -> None:
    batch = AdvantageBatch(
        scores=torch.tensor([-5.0, 1.0]),
        groups=torch.tensor([0, 0]),
        lengths=torch.tensor([2, 1]),
        values=torch.tensor([0.25, 0.75, 0.5]),
        truncated=torch.tensor([True, False]),
    )
    raw = advantage_options(whiten=False)
    assert estimate(ESTIMATORS["gae"], batch, raw).tokens.tolist() == [-5.25, -5.75, 0.5]
    got = estimate(ESTIMATORS["gae"], batch, dataclasses.replace(raw, bootstrap_truncated=True))
    assert got.tokens.tolist() == [0.5, 0.0, 0.5] and got.returns.tolist() == [0.75, 0.75, 1.0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_needed_field_is_asked_for_by_name(name: str) -> None:
    batch = for_name(make([(0, 2, 1.0, False), (0, 1, 0.0, False)], 0), name)
    optional = {
        "components",
        "values",
        "truncated",
        "greedy_scores",
        "log_probs",
        "sum_pi_squared",
        "weights",
    }
    bare = dataclasses.replace(batch, **dict.fromkeys(optional - ESTIMATORS[name].needs))
    assert isinstance(estimate(ESTIMATORS[name], bare, PLAIN), Advantages)
    for field in ESTIMATORS[name].needs:
        with pytest.raises(ValueError, match=f"{name} needs {field}$"):
            estimate(ESTIMATORS[name], dataclasses.replace(bare, **{field: None}), PLAIN)


def test_what_cannot_be_estimated_is_refused() -> None:
    batch = make([(0, 2, 1.0, False)], 0, token_rewards=True)
    with pytest.raises(ValueError, match="cannot use token_rewards"):
        estimate(ESTIMATORS["gdpo"], batch, PLAIN)
    with pytest.raises(ValueError, match="bootstrap_truncated needs truncated"):
        estimate(
            ESTIMATORS["gae"],
            dataclasses.replace(batch, truncated=None),
            advantage_options(bootstrap_truncated=True),
        )
    with pytest.raises(ValueError, match="values is not finite"):
        estimate(
            ESTIMATORS["gae"],
            dataclasses.replace(batch, values=torch.tensor([0.0, torch.inf])),
            PLAIN,
        )
    with pytest.raises(ValueError, match=r"values has shape \(3,\), must have \(2,\)"):
        dataclasses.replace(batch, values=torch.zeros(3))
    with pytest.raises(ValueError, match=r"components\['a'\] has shape"):
        dataclasses.replace(batch, components={"a": torch.zeros(3)})
    with pytest.raises(ValueError, match="gamma and lam"):
        advantage_options(gamma=1.5)
