"""Old log-probs, weights and rejection in the engine, compared with a plain loop.

Steps without a token are tested too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from millrace.algorithms.policy_loss import AggMode
from millrace.types import Sample, Thread
from tests.train import cases as train_cases
from tests.train.algorithm_cases import (
    DECOUPLED,
    REINFORCE,
    VERSION,
    Rows,
    Rule,
    Token,
    Trained,
    at_version,
    config_of,
    correction,
    engine_of,
    group_advantages,
    moments,
    plain_rows,
    plain_train,
    samples_of,
    scores_of,
    step,
    weights,
)

CAP = 2.0


# Rules: the trained tokens, in plain code
# ------------------------------------------------------------------------------------


def bypass(rows: Rows, _: Rows) -> Trained:
    return [[(t, t.rollout, 1.0) for t in row] for row in rows]


def decoupled(rows: Rows, _: Rows) -> Trained:
    return [[(t, t.arrival, 1.0) for t in row] for row in rows]


def token_weight(t: Token) -> float:
    return min(math.exp(t.arrival - t.rollout), CAP)


def token_weights(rows: Rows, _: Rows) -> Trained:
    return [[(t, t.arrival, token_weight(t)) for t in row] for row in rows]


def normalised_token_weights(rows: Rows, batch: Rows) -> Trained:
    mean = np.mean([token_weight(t) for row in batch for t in row])
    return [[(t, t.arrival, token_weight(t) / mean) for t in row] for row in rows]  # type: ignore[misc]


def sequence_weights(rows: Rows, _: Rows) -> Trained:
    products = [min(math.exp(sum(t.arrival - t.rollout for t in row)), CAP) for row in rows]
    return [[(t, t.arrival, w) for t in row] for row, w in zip(rows, products, strict=True)]


def weights_in_passing(rows: Rows, _: Rows) -> Trained:
    return [
        [(t, t.rollout, min(math.exp(t.current - t.rollout), CAP)) for t in row] for row in rows
    ]


def interpolated(t: Token) -> float:
    return t.rollout + t.age / (t.age + 1) * (t.current - t.rollout)


def interpolated_weights(rows: Rows, _: Rows) -> Trained:
    return [
        [(t, interpolated(t), min(math.exp(interpolated(t) - t.rollout), CAP)) for t in row]
        for row in rows
    ]


def by_token_and_sequence(rows: Rows, _: Rows) -> Trained:
    """Keep tokens with 0.4 <= arrival / rollout <= 2, in responses where no k2 exceeds 9."""

    def far(row: list[Token]) -> bool:
        return max((t.arrival - t.rollout) ** 2 / 2 for t in row) > 9

    return [
        [
            (t, t.arrival, 1.0)
            for t in row
            if not far(row) and 0.4 <= math.exp(t.arrival - t.rollout) <= 2
        ]
        for row in rows
    ]


def by_current_policy(rows: Rows, _: Rows) -> Trained:
    """Keep a response if the mean k3 of current to rollout <= 1.15, anew in each mini-batch."""

    def near(row: list[Token]) -> bool:
        logs = [t.current - t.rollout for t in row]
        return bool(row) and np.mean([math.exp(x) - 1 - x for x in logs]) <= 1.15  # type: ignore[return-value]

    return [[(t, t.rollout, 1.0) for t in row] if near(row) else [] for row in rows]


def geometric_weights(rows: Rows, _: Rows) -> Trained:
    means = [np.mean([t.arrival - t.rollout for t in row]) if row else 0.0 for row in rows]
    bounded = [min(max(math.exp(mean), 0.25), CAP) for mean in means]
    return [[(t, t.arrival, w) for t in row] for row, w in zip(rows, bounded, strict=True)]


def linear_weights(rows: Rows, _: Rows) -> Trained:
    def proximal(t: Token) -> float:
        return math.log((math.exp(t.rollout) + t.age * math.exp(t.current)) / (t.age + 1))

    return [
        [(t, proximal(t), min(math.exp(proximal(t) - t.rollout), CAP)) for t in row] for row in rows
    ]


def by_second_moment(rows: Rows, _: Rows) -> Trained:
    """Keep the tokens of smallest squares, with a mean of at most 0.1 over the mini-batch."""
    squares = sorted((t.current - t.rollout) ** 2 for row in rows for t in row)
    count = sum(np.mean(squares[: i + 1]) <= 0.1 for i in range(len(squares)))
    return [
        [(t, t.rollout, 1.0) for t in row if (t.current - t.rollout) ** 2 <= squares[count - 1]]
        for row in rows
    ]


def off_policy_mask(rows: Rows, _: Rows) -> Trained:
    """Weigh tokens of A < 0 by 0 if the mean of rollout - current is over 0.7."""

    def near(row: list[Token]) -> bool:
        return bool(np.mean([t.rollout - t.current for t in row]) <= 0.7)

    return [[(t, t.rollout, float(near(row) or t.advantage >= 0)) for t in row] for row in rows]


def by_age(rows: Rows, _: Rows) -> Trained:
    return [[(t, t.rollout, 1.0) for t in row if t.age <= 1] for row in rows]


def decoupled_with(**keys: Any) -> dict[str, Any]:
    """Return a decoupled run with this correction."""
    return {"async_training": DECOUPLED, "algorithm": correction(**keys)}


def bypassed_with(**keys: Any) -> dict[str, Any]:
    return {"algorithm": correction(**keys)}


RULES: dict[str, tuple[dict[str, Any], Rule]] = {
    "bypass": ({}, bypass),
    "decoupled": (decoupled_with(), decoupled),
    "token weights": (decoupled_with(rollout_is="token"), token_weights),
    "normalised": (
        decoupled_with(rollout_is="token", rollout_is_batch_normalize=True),
        normalised_token_weights,
    ),
    "sequence weights": (decoupled_with(rollout_is="sequence"), sequence_weights),
    "weights in passing": (
        {"actor": REINFORCE} | bypassed_with(rollout_is="token"),
        weights_in_passing,
    ),
    "interpolated": (
        decoupled_with(rollout_is="token", proximal="interpolate"),
        interpolated_weights,
    ),
    "rejection": (
        decoupled_with(rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold=("0.4_2.0", 9)),
        by_token_and_sequence,
    ),
    "rejection by the current policy": (
        bypassed_with(rollout_rs="seq_mean_k3", rollout_rs_threshold=1.15),
        by_current_policy,
    ),
    "age": (bypassed_with(max_token_age=1), by_age),
    "geometric weights": (
        decoupled_with(rollout_is="geometric", rollout_is_threshold_lower=0.25),
        geometric_weights,
    ),
    "linear": (decoupled_with(rollout_is="token", proximal="linear"), linear_weights),
    "second moment": (bypassed_with(m2_threshold=0.1), by_second_moment),
    "off-policy mask": (bypassed_with(off_policy_mask_threshold=0.7), off_policy_mask),
}
REJECT = {"rejection", "rejection by the current policy", "age", "second moment"}


@pytest.mark.parametrize(
    ("name", "agg"),
    [(n, a) for n in RULES for a in (get_args(AggMode) if n in REJECT else ["token-mean"])],
)
def test_two_steps_are_those_of_a_plain_loop(name: str, agg: str, folder: str) -> None:
    """Ratios, weights and the choice of trained tokens match the plain loop.

    In every aggregation, denominators count only the tokens that rejection leaves.
    """
    keys, rule = RULES[name]
    config = config_of(**keys | {"actor": {"loss_agg_mode": agg} | keys.get("actor", {})})
    samples = samples_of()
    engine = engine_of(folder, config)
    report = step(engine, samples)
    plain = plain_train(folder, config, samples, group_advantages(scores_of(samples)), rule)
    assert len(plain.losses) == 2
    assert report.metrics["actor/pg_loss"] == pytest.approx(
        np.mean(plain.losses), rel=1e-6, abs=1e-9
    )
    assert report.metrics["train/trained_token_share"] == pytest.approx(
        plain.trained / plain.tokens
    )
    assert (plain.trained < plain.tokens) == (name in REJECT)
    assert report.totals["train/rejected_tokens"] == plain.tokens - plain.trained
    assert report.totals["train/filtered_tokens"] == 0
    for key, weight in weights(engine.policy.model).items():
        torch.testing.assert_close(weight, plain.weights[key], rtol=1e-5, atol=1e-7)


def test_a_rejected_response_is_in_no_baseline(folder: str) -> None:
    keys = correction(
        rollout_rs="seq_mean_k1", rollout_rs_threshold="0.4_1.5", reject_before_baseline=True
    )
    config = config_of(async_training=DECOUPLED, algorithm=keys)
    samples = samples_of()

    def kept(row: list[Token]) -> bool:
        return not row or 0.4 <= math.exp(np.mean([t.arrival - t.rollout for t in row])) <= 1.5

    def rule(rows: Rows, _: Rows) -> Trained:
        return [[(t, t.arrival, 1.0) for t in row] if kept(row) else [] for row in rows]

    none = group_advantages(scores_of(samples))
    found = [
        [kept(row) for row in rows]
        for rows in plain_rows(train_cases.model_of({}, folder), samples, none, VERSION)
    ]
    advantages = group_advantages(scores_of(samples), found)
    assert any(
        advantages[key] != pytest.approx(none[key]) for key in advantages if found[key[0]][key[1]]
    )
    engine = engine_of(folder, config)
    report = step(engine, samples)
    plain = plain_train(folder, config, samples, advantages, rule)
    assert report.metrics["actor/pg_loss"] == pytest.approx(np.mean(plain.losses), rel=1e-6)
    for key, weight in weights(engine.policy.model).items():
        torch.testing.assert_close(weight, plain.weights[key], rtol=1e-5, atol=1e-7)


# Steps without a token
# --------------------------------------------------------------------------------------------------

ONE_BY_ONE = {"actor": {"ppo_mini_batch_size": 1}}


def far_off(one: Sample) -> Sample:
    """Return the same sample with rollout log-probs of -15, far from those of the policy."""
    said = [
        [
            replace(s, log_probs=type(s.log_probs)("f", [-15.0] * len(s.log_probs)))
            for s in t.segments
        ]
        for t in one.trajectories
    ]
    return replace(
        one,
        trajectories=tuple(
            replace(t, threads=(Thread(tuple(s)),))
            for t, s in zip(one.trajectories, said, strict=True)
        ),
    )


REJECT_ALL: dict[str, tuple[dict[str, Any], Any]] = {
    "age": (correction(max_token_age=1), lambda one: at_version(one, 0)),
    "rule, decoupled": (
        correction(rollout_rs="token_k1", rollout_rs_threshold="0.001_1000", rollout_is="token"),
        far_off,
    ),
    "rule, bypass": (correction(rollout_rs="token_k1", rollout_rs_threshold="0.001_1000"), far_off),
}


def rejecting(name: str, folder: str) -> tuple[Any, Any, tuple[Sample, ...]]:
    """Return an engine after one step, a function that spoils a sample, and three good samples.

    Every token of a spoiled sample is rejected.
    """
    algorithm, spoil = REJECT_ALL[name]
    asynchronous = DECOUPLED if "decoupled" in name else {}
    engine = engine_of(
        folder, config_of(algorithm=algorithm, async_training=asynchronous, **ONE_BY_ONE)
    )
    samples = tuple(at_version(one, VERSION) for one in samples_of(3, [4, 3, 5]))
    step(engine, samples[:1])
    return engine, spoil, samples


@pytest.mark.parametrize("name", REJECT_ALL)
def test_a_mini_batch_that_is_rejected_whole_changes_nothing_but_the_clock(
    name: str, folder: str
) -> None:
    engine, spoil, samples = rejecting(name, folder)
    before, remembered = weights(engine.policy), moments(engine)
    report = step(engine, (spoil(samples[1]),))
    assert (report.optimizer_steps, report.skipped_steps) == (1, 1)
    totals = report.totals
    assert (totals["actor/rejected_steps"], totals["actor/nonfinite_steps"]) == (1.0, 0)
    assert report.metrics["train/trained_token_share"] == 0
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert not {"actor/pg_loss", "actor/entropy", "actor/grad_norm"} & report.metrics.keys(), (
        "0 would be a figure of something"
    )
    assert all(torch.equal(weight, before[key]) for key, weight in weights(engine.policy).items())
    same = [torch.equal(a, b) for a, b in zip(moments(engine), remembered, strict=True)]
    assert same and all(same)
    assert engine.steps == 2
    lr = step(engine, samples[2:]).metrics["actor/lr"]
    assert lr == pytest.approx(train_cases.OPTIM.lr * (1 - 1 / (train_cases.HORIZON - 1))), (
        "the third step's, from 0"
    )


@pytest.mark.parametrize("name", REJECT_ALL)
def test_of_several_mini_batches_one_that_is_rejected_is_as_if_it_were_not_there(
    name: str, folder: str
) -> None:
    engine, spoil, samples = rejecting(name, folder)
    other, _, _ = rejecting(name, folder)
    report = step(engine, (samples[0], spoil(samples[1]), samples[2]))
    assert (report.optimizer_steps, report.skipped_steps) == (3, 1)
    assert report.totals["actor/rejected_steps"] == 1.0
    assert all(math.isfinite(value) for value in report.metrics.values())
    step(other, (samples[0], replace(samples[1], trajectories=()), samples[2]))
    ours, theirs = weights(engine.policy), weights(other.policy)
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-12, atol=1e-14)
