"""The experience made from a batch, compared with plain code.

The tests cover baselines, filters, KL in the reward, greedy baselines, the reference and ages.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.errors import MillraceError
from millrace.train.fsdp.engine import FsdpTrainEngine
from millrace.train.mini_batch import mini_batches, settle
from millrace.types import Author, Sample, Stop
from tests.train import cases as train_cases
from tests.train.algorithm_cases import (
    DECOUPLED,
    TEMPERATURE,
    Rows,
    Trained,
    at_version,
    config_of,
    correction,
    engine_of,
    experience,
    group_advantages,
    log_probs,
    plain_train,
    sample,
    samples_of,
    scores_of,
    step,
    trajectory,
    weights,
)
from tests.train.cases import HORIZON, OPTIM
from tests.train.plain import plain_log_probs


def by_trajectory(values: torch.Tensor, samples: tuple[Sample, ...]) -> list[list[float]]:
    """Split the values of the policy's tokens by trajectory."""
    counts = [t.num_policy_tokens for one in samples for t in one.trajectories]
    return [part.tolist() for part in values.split(counts)]


def each_token(
    advantages: dict[tuple[int, int], float], samples: tuple[Sample, ...]
) -> list[list[float]]:
    return [
        [advantages[i, j]] * t.num_policy_tokens
        for i, one in enumerate(samples)
        for j, t in enumerate(one.trajectories)
    ]


def same(found: list[list[float]], want: list[list[float]]) -> None:
    assert [len(row) for row in found] == [len(row) for row in want]
    for a, b in zip(found, want, strict=True):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-12)


# Excluded responses and baselines
# --------------------------------------------------------------------------------------------


def with_truncated() -> tuple[Sample, ...]:
    """Two groups; in each, the truncated response has a score that the others do not have."""
    cut = Stop.LENGTH
    return (
        sample(
            0,
            trajectory(-2.0, -2.5, score=1.0),
            trajectory(-3.0, score=0.0),
            trajectory(-2.2, -2.0, -2.1, score=5.0, stop=cut),
        ),
        sample(
            1,
            trajectory(-2.6, -2.3, score=0.5),
            trajectory(-2.0, -1.9, score=-4.0, stop=cut),
            trajectory(-2.1, score=0.0),
        ),
    )


ALWAYS = {"rollout_rs": "token_k1", "rollout_rs_threshold": "1e-6_1e6"}
"""A rule that accepts everything."""


@pytest.mark.parametrize("correct", [{}, ALWAYS | {"reject_before_baseline": True}])
def test_truncated_responses_count_in_baselines_and_none_of_their_tokens_is_trained(
    correct: dict[str, Any], folder: str
) -> None:
    """A filtered response counts in the baseline even if rejected responses do not."""
    config = config_of(algorithm={"overlong_filtering": True} | correction(**correct))
    samples = with_truncated()
    advantages = group_advantages(scores_of(samples))
    same(
        by_trajectory(experience(engine_of(folder, config), samples).advantages, samples),
        each_token(advantages, samples),
    )
    truncated = [t.stop is Stop.LENGTH for one in samples for t in one.trajectories]

    def rule(rows: Rows, _: Rows) -> Trained:
        return [
            [] if cut else [(t, t.rollout, 1.0) for t in row]
            for row, cut in zip(rows, truncated, strict=True)
        ]

    engine = engine_of(folder, config)
    report = step(engine, samples)
    plain = plain_train(folder, config, samples, advantages, rule)
    assert report.metrics["train/trained_token_share"] == pytest.approx(6 / 11)
    assert report.totals["train/filtered_tokens"] == 5
    assert report.totals["train/rejected_tokens"] == 0
    assert report.metrics["actor/pg_loss"] == pytest.approx(plain.losses[0], rel=1e-6)
    for name, weight in weights(engine.policy.model).items():
        torch.testing.assert_close(weight, plain.weights[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("before_baseline", [False, True])
def test_old_responses_count_in_baselines_unless_what_is_rejected_does_not(
    before_baseline: bool, folder: str
) -> None:
    rules = ALWAYS | {"reject_before_baseline": True} if before_baseline else {}
    engine = engine_of(folder, config_of(algorithm=correction(max_token_age=1, **rules)))
    group = (
        trajectory(-2.0, -2.5, score=1.0, version=2),
        trajectory(-3.0, score=0.0, version=1),
        trajectory(-2.2, score=5.0),
    )
    data = experience(engine, (sample(0, *group),))
    assert data.ages.tolist() == [0, 0, 1, 2] and data.include.tolist() == [True, True, True, False]
    kept = [[True, True, not before_baseline]]
    same(
        by_trajectory(data.advantages, (sample(0, *group),)),
        each_token(group_advantages([[1, 0, 5]], kept), (sample(0, *group),)),
    )


def test_the_share_of_equal_samples_compares_exactly_and_ignores_samples_without_trajectories(
    folder: str,
) -> None:
    thirds = sample(0, *(trajectory(-2.0, score=0.3) for _ in range(7)))
    mixed = sample(1, trajectory(-2.0, score=0.0), trajectory(-2.0, score=1.0))
    alone, empty = sample(2, trajectory(-2.0, score=5.0)), sample(3)
    engine = engine_of(folder, config_of())
    data = experience(engine, (thirds, mixed, alone, empty))
    assert data.zero_variance_share == 2 / 3
    assert experience(engine, (thirds, empty)).zero_variance_share == 1.0


# Rewards of tokens
# --------------------------------------------------------------------------------------------------


def with_other_reference(engine: FsdpTrainEngine) -> None:
    assert engine.reference is not None
    with torch.no_grad():
        for parameter in engine.reference.module.parameters():
            parameter.mul_(1.2)


def plain_reference(folder: str, samples: tuple[Sample, ...]) -> list[list[float]]:
    model = train_cases.model_of({}, folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
        rows = [(one, t) for one in samples for t in one.trajectories]
        return [
            [float(p) for p, _, _ in plain_log_probs(model, one, t, TEMPERATURE)] for one, t in rows
        ]


def rollout_log_probs(samples: tuple[Sample, ...]) -> list[list[float]]:
    return [
        [p for s in t.segments for p in s.log_probs] for one in samples for t in one.trajectories
    ]


@pytest.mark.parametrize("decoupled", [False, True])
def test_kl_in_the_reward_changes_advantages_as_reward_to_go_says(
    decoupled: bool, folder: str
) -> None:
    """The KL uses the old log-probs: the rollout's, or the policy's at the arrival of the batch."""
    algorithm = {
        "adv_estimator": "reinforce_plus_plus",
        "gamma": 0.9,
        "use_kl_in_reward": True,
        "kl_ctrl": {"kl_coef": 0.5},
    }
    samples = samples_of()[:4]
    engine = engine_of(
        folder, config_of(algorithm=algorithm, async_training=DECOUPLED if decoupled else {})
    )
    with_other_reference(engine)
    old = log_probs(engine, samples) if decoupled else rollout_log_probs(samples)
    to_go, penalties = [], []
    scores = [score for group in scores_of(samples) for score in group]
    for row, reference, score in zip(old, plain_reference(folder, samples), scores, strict=True):
        penalties += [a - b for a, b in zip(row, reference, strict=True)]
        rewards, sums, total = (
            [-0.5 * (a - b) for a, b in zip(row, reference, strict=True)],
            [],
            0.0,
        )
        if rewards:
            rewards[-1] += score
        for reward in reversed(rewards):
            total = reward + 0.9 * total
            sums.append(total)
        to_go.append(sums[::-1])
    flat = np.concatenate(to_go)
    want = [
        list((np.array(row) - flat.mean()) / math.sqrt(flat.var(ddof=1) + 1e-8)) for row in to_go
    ]
    data = experience(engine, samples)
    for a, b in zip(by_trajectory(data.advantages, samples), want, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
    assert data.kl_to_reference == pytest.approx(np.mean(penalties), rel=1e-5)


def test_the_adaptive_coefficient_moves_and_is_in_a_checkpoint(folder: str, tmp_path: Path) -> None:
    ctrl = {"type": "adaptive", "kl_coef": 0.5, "target_kl": 0.01, "horizon": 100}
    algorithm = {"use_kl_in_reward": True, "kl_penalty": "k3", "kl_ctrl": ctrl}
    engine = engine_of(folder, config_of(algorithm=algorithm))
    with_other_reference(engine)
    samples = samples_of()[:4]
    first = step(engine, samples).metrics
    moved = 0.5 * (1 + min(max(first["actor/reward_kl_penalty"] / 0.01 - 1, -0.2), 0.2) * 13 / 100)
    assert (
        engine.kl_coef == pytest.approx(moved)
        and moved > 0.5
        and first["actor/reward_kl_penalty_coeff"] == 0.5
    )
    asyncio.run(engine.save(str(tmp_path)))
    assert step(engine, samples).metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(moved)
    engine.restart(OPTIM, HORIZON)
    assert engine.kl_coef == 0.5
    asyncio.run(engine.load(str(tmp_path)))
    assert engine.kl_coef == pytest.approx(moved)


# Estimators that need more than scores
# ------------------------------------------------------------------------------------


def test_remax_subtracts_the_score_of_the_greedy_response(folder: str) -> None:
    engine = engine_of(folder, config_of(algorithm={"adv_estimator": "remax"}))
    samples = (
        sample(
            0,
            trajectory(-2.0, -2.5, score=1.0),
            trajectory(-3.0, score=0.25),
            greedy=trajectory(-1.0, score=0.75),
        ),
        sample(1, trajectory(-2.0, score=0.0), greedy=trajectory(-1.0, -1.0, score=0.0)),
    )
    data = experience(engine, samples)
    same(by_trajectory(data.advantages, samples), [[0.25, 0.25], [-0.5], [0.0]])
    assert len(data.rollout) == 4, "the greedy response is not trained"
    for greedy in (None, trajectory(-1.0, score=None)):
        with pytest.raises(MillraceError, match="a greedy response of sample 5 has no score"):
            step(engine, (samples[0], sample(5, trajectory(-2.0, score=0.0), greedy=greedy)))


def test_gdpo_normalises_each_component_and_misses_none(folder: str) -> None:
    extras = [
        {"right": 1.0, "short": 0.2},
        {"right": 0.0, "short": 0.9},
        {"right": 0.0, "short": 0.1},
    ]
    group = sample(0, *(trajectory(-2.0, score=7.0, extra=extra) for extra in extras))
    algorithm = {
        "adv_estimator": "gdpo",
        "gdpo_reward_keys": ["right", "short"],
        "gdpo_reward_weights": [1.0, 0.5],
    }
    data = experience(engine_of(folder, config_of(algorithm=algorithm)), (group,))
    right, short = (
        group_advantages([[extra[name] for extra in extras]]) for name in ("right", "short")
    )
    mixed = np.array([right[0, j] + 0.5 * short[0, j] for j in range(3)])
    assert data.advantages.tolist() == pytest.approx(
        list((mixed - mixed.mean()) / math.sqrt(mixed.var(ddof=1) + 1e-8))
    )

    lacking = sample(
        0,
        trajectory(-2.0, extra={"right": 1.0, "long": 0.0}),
        trajectory(-2.0, extra={"right": 0.0}),
    )
    with pytest.raises(
        MillraceError,
        match=r"gdpo_reward_keys: a reward has no component 'short' \(it has long, right\)",
    ):
        step(engine_of(folder, config_of(algorithm=algorithm)), (lacking,))
    every = engine_of(folder, config_of(algorithm={"adv_estimator": "gdpo"}))
    with pytest.raises(MillraceError, match="no component 'long'"):
        step(every, (lacking,))
    with pytest.raises(MillraceError, match="returns no components"):
        step(every, (sample(0, trajectory(-2.0), trajectory(-2.0)),))


@pytest.mark.parametrize("keys", [[], ["turn_rewards"]])
def test_gdpo_takes_an_episode_without_rewards_of_turns_as_zero(
    folder: str, keys: list[str]
) -> None:
    algorithm = {"adv_estimator": "gdpo", "gdpo_reward_keys": keys}
    extras: list[dict[str, float]] = [{"turn_rewards": 1.0}, {}]
    group = sample(0, *(trajectory(-2.0, score=1.0, extra=extra) for extra in extras))
    data = experience(engine_of(folder, config_of(algorithm=algorithm)), (group,))
    assert data.advantages[0] > 0 > data.advantages[-1]


# Reference, draws, ages
# --------------------------------------------------------------------------------------------------


def test_the_reference_is_the_policy_at_begin_and_stays(folder: str) -> None:
    engine = engine_of(folder, config_of(actor={"use_kl_loss": True, "ppo_mini_batch_size": 100}))
    start = weights(engine.policy)
    losses = [step(engine, samples_of()).metrics["actor/kl_loss"] for _ in range(3)]
    assert abs(losses[0]) < 1e-12 and losses[2] > losses[1] > 1e-7
    assert engine.reference is not None
    assert all(
        torch.equal(weight, start[name])
        for name, weight in weights(engine.reference.module).items()
    )
    assert any(
        not torch.equal(weight, start[name]) for name, weight in weights(engine.policy).items()
    )
    engine.restart(OPTIM, HORIZON)
    now = weights(engine.policy)
    assert all(
        torch.equal(weight, now[name]) for name, weight in weights(engine.reference.module).items()
    )


def test_clip_cov_draws_by_seed_and_step_alone(folder: str) -> None:
    loss = {"loss_mode": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": -5.0}

    def drawn(seed: int, steps: int) -> list[int]:
        actor = {"policy_loss": loss, "ppo_mini_batch_size": 100}
        engine = engine_of(folder, config_of(actor=actor, trainer={"seed": seed}))
        engine.actor.steps = steps
        torch.manual_seed(steps + 17 * seed)  # has no effect
        data = experience(engine, samples_of())
        (members,) = mini_batches(data, 100)
        selected = settle(data, members, engine.actor, engine.options, untouched=True).selected
        assert selected is not None
        return [i for i, chosen in enumerate(selected.tolist()) if chosen]

    one = drawn(0, 3)
    assert len(one) == int(0.2 * 138) and one == drawn(0, 3)
    assert one != drawn(0, 4) and one != drawn(1, 3)


def test_metrics_by_age_are_those_of_tokens_of_known_versions(folder: str) -> None:
    """The bins are ages 0, 1, 2 and 3 or older.

    The log-probs are those of the policy before the first step.
    """
    asynchronous = {"staleness_threshold": 2.0, "lookahead": 4}
    config = config_of(async_training=asynchronous, actor={"ppo_mini_batch_size": 5})
    assert config.schedule.lag_bound == 3
    versions = [7, 6, 5, 4, 2]
    samples = tuple(
        at_version(one, v) for one, v in zip(samples_of(4, [3, 3, 3, 3, 3]), versions, strict=True)
    )
    engine = engine_of(folder, config)
    now, then, first = log_probs(engine, samples), rollout_log_probs(samples), 0
    bins: dict[str, list[float]] = {"0": [], "1": [], "2": [], "3+": []}
    for one, version in zip(samples, versions, strict=True):
        for _ in one.trajectories:
            bins["3+" if version < 5 else str(7 - version)] += [
                a - b for a, b in zip(now[first], then[first], strict=True)
            ]
            first += 1
    metrics = step(engine, samples, 7).metrics
    total = sum(len(logs) for logs in bins.values())
    for name, logs in bins.items():
        ratios = np.exp(logs)
        assert metrics[f"staleness/token_share/{name}"] == pytest.approx(len(logs) / total)
        assert metrics[f"staleness/log_ratio/{name}"] == pytest.approx(np.mean(logs), rel=1e-5)
        assert metrics[f"staleness/ess/{name}"] == pytest.approx(
            ratios.sum() ** 2 / len(logs) / (ratios**2).sum(), rel=1e-5
        )
    assert {k for k in metrics if k.startswith("staleness/ess/")} == {
        f"staleness/ess/{name}" for name in bins
    }
    tokens = [sum(t.num_policy_tokens for t in one.trajectories) for one in samples]
    assert metrics["staleness/token_mean"] == pytest.approx(np.dot(tokens, [0, 1, 2, 3, 5]) / total)
    assert metrics["staleness/token_max"] == 5


def test_token_weights_read_the_ids_of_their_tokens_and_multiply_the_advantages(
    folder: str, tmp_path: Path
) -> None:
    (tmp_path / "by_id.py").write_text("def by_id(batch, tokens, advantages):\n    return tokens\n")
    samples = samples_of(3, [2, 3, 1])
    engines = [
        engine_of(folder, config_of(algorithm=keys))
        for keys in ({}, {"token_weights": f"{tmp_path}/by_id.py:by_id"})
    ]
    plain, weighed = (by_trajectory(experience(e, samples).advantages, samples) for e in engines)
    ids = [
        [int(token) for s in t.segments if s.author is Author.POLICY for token in s.tokens]
        for one in samples
        for t in one.trajectories
    ]
    want = [[a * i for a, i in zip(*row, strict=True)] for row in zip(plain, ids, strict=True)]
    same(weighed, want)
    assert any(any(row) for row in want)
