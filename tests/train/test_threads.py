"""An episode of k threads trains like its single thread: weights, statistics and log-probs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.config import Config
from millrace.errors import ConfigError
from millrace.ports import TrainBatch
from millrace.train.packing import pack, split
from millrace.train.rows import arrays_of, rows_of_samples
from millrace.types import Author, Sample, Segment, Thread, Trajectory, floats_of, tokens_of
from tests.train.cases import CPU, engine_of, write_models
from tests.train.samples import random_samples
from tests.train.threads import cut_batch

CASES: dict[str, dict[str, Any]] = {
    "token mean": {},
    "small micro-batches": {"ppo_max_token_len_per_gpu": 60, "ppo_mini_batch_size": 3},
    "a mean for each trajectory, two epochs, own old log-probs": {
        "loss_agg_mode": "seq-mean-token-mean",
        "ppo_epochs": 2,
        "ppo_mini_batch_size": 3,
        "own_old": True,
        "entropy_coeff": 0.01,
    },
    "gspo": {"policy_loss": {"loss_mode": "gspo"}, "own_old": True, "ppo_mini_batch_size": 3},
    "geometric mean": {"policy_loss": {"loss_mode": "geo_mean"}},
    "Dr.GRPO": {"loss_agg_mode": "seq-mean-token-sum-norm", "norm_by_std": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("models"))
    write_models(path)
    return path


def batch_of(seed: int) -> TrainBatch:
    return TrainBatch(random_samples(seed, [4, 1, 3, 5, 2]), version=2)


def rewarded(batch: TrainBatch, seed: int = 3) -> TrainBatch:
    """Return the batch with rewards of turns, which the scores include."""
    rng = np.random.default_rng(seed)

    def one(t: Trajectory) -> Trajectory:
        segments, total = [], 0.0
        for s in t.segments:
            reward = float(rng.uniform(-1, 1)) if s.author is Author.POLICY else None
            total += reward or 0.0
            segments.append(replace(s, reward=reward))
        assert t.score is not None
        score = replace(t.score, value=t.score.value + total)
        return replace(t, threads=(Thread(tuple(segments)),), score=score)

    return replace(
        batch,
        samples=tuple(
            replace(s, trajectories=tuple(one(t) for t in s.trajectories)) for s in batch.samples
        ),
    )


def trained(case: dict[str, Any], folder: str, batches: list[TrainBatch]) -> dict[str, Any]:
    engine = engine_of(case, folder, 0)
    log_probs = asyncio.run(engine.log_probs(batches[0].samples))
    reports = [asyncio.run(engine.step(batch)) for batch in batches]
    return {
        "log_probs": log_probs,
        "metrics": [r.metrics for r in reports],
        "weights": {n: p.detach().clone() for n, p in engine.policy.model.named_parameters()},
    }


def check_equal(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-8) -> None:
    assert len(one["log_probs"]) == len(other["log_probs"]), "one list for each trajectory"
    for a, b in zip(one["log_probs"], other["log_probs"], strict=True):
        assert a == pytest.approx(b, abs=1e-6)
    for a, b in zip(one["metrics"], other["metrics"], strict=True):
        same = {name for name in a if name != "train/pad_share"}
        assert {n: a[n] for n in same} == pytest.approx({n: b[n] for n in same}, abs=1e-6)
    for name, weight in one["weights"].items():
        assert (weight - other["weights"][name]).abs().max().item() < tolerance, name


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("whole_openings", [False, True])
def test_more_threads_with_equal_contexts_give_the_same_gradient(
    case: dict[str, Any], whole_openings: bool, folder: str
) -> None:
    batches = [batch_of(10), batch_of(11)]
    several = [cut_batch(b, whole_openings=whole_openings) for b in batches]
    assert any(len(t.threads) > 1 for s in several[0].samples for t in s.trajectories)
    assert any(len(t.threads) == 0 for s in several[0].samples for t in s.trajectories)
    check_equal(trained(case, folder, batches), trained(case, folder, several))


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "reinforce_plus_plus"])
def test_rewards_of_turns_and_statistics_do_not_change_with_more_threads(
    estimator: str, folder: str
) -> None:
    case: dict[str, Any] = {}
    batch = rewarded(batch_of(13))
    rows = rows_of_samples(batch.samples)
    cut_rows = rows_of_samples(cut_batch(batch).samples)
    assert rows.turn_rewards is not None and cut_rows.turn_rewards is not None
    assert rows.turn_rewards.tolist() == cut_rows.turn_rewards.tolist()
    one, several = (
        arrays_of(b, Config(algorithm={"adv_estimator": estimator}).algorithm)
        for b in (batch, cut_batch(batch))
    )
    for name in ("lengths", "ids", "ages", "rollout", "scores", "groups", "truncated"):
        assert torch.equal(getattr(one, name), getattr(several, name)), name
    assert one.equal_share == several.equal_share
    check_equal(trained(case, folder, [batch]), trained(case, folder, [cut_batch(batch)]))


def test_a_reward_of_a_turn_is_at_its_last_token_and_its_tokens_before_it_earn_it() -> None:
    policy = lambda n, reward: Segment(  # noqa: E731
        tokens_of([1] * n),
        log_probs=floats_of([-1.0] * n),
        version=0,
        reward=reward,  # type: ignore[arg-type]
    )
    middle = Segment(tokens_of([5, 6]), Author.ENVIRONMENT)
    sample = random_samples(1, [1])[0]
    one = Trajectory.of((policy(2, 0.5), middle, policy(3, None), policy(1, -1.0)))
    rows = rows_of_samples([replace(sample, trajectories=(one,))])
    assert rows.turn_rewards is not None
    assert rows.turn_rewards.tolist() == [0, 0.5, 0, 0, 0, -1.0]


def test_rows_of_equal_openings_share_them_and_others_do_not() -> None:
    """Two siblings have the prompt's opening, and three threads have two openings of their own."""
    base = random_samples(2, [1])[0]
    policy = Segment(tokens_of([1, 2]), log_probs=floats_of([-1.0] * 2), version=0)
    own, other = tokens_of([9, 9, 9]), tokens_of([9, 9, 8])
    first = Trajectory((Thread((policy,)), Thread((policy,), own)))
    second = Trajectory((Thread((policy,), other), Thread((policy,)), Thread((policy,), own)))
    sample = Sample(base.prompt, (first, second))
    rows = rows_of_samples([sample, replace(sample, prompt=replace(base.prompt, index=1))])
    assert rows.opening.tolist() == [0, 2, 3, 0, 2, 1, 4, 5, 1, 4]
    assert rows.trajectory.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    assert rows.first_row.tolist() == [0, 5, 10] and rows.num_trajectories == 4
    micro = pack(rows, np.arange(5), CPU, padded=True)
    prompt = len(base.prompt.tokens)
    assert len(micro.input_ids) == prompt + 3 + 3 + 5 * 1, "each row reads one of its own tokens"
    assert micro.num_sequences == 2
    assert micro.sequence.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]


def test_threads_of_a_trajectory_stay_in_one_micro_batch_where_they_fit() -> None:
    for seed in range(20):
        samples = cut_batch(TrainBatch(random_samples(seed, [6, 2, 5]), 0)).samples
        rows = rows_of_samples(samples)
        for limit, ranks in ((45, 1), (45, 2), (1000, 3)):
            shares = split(rows, np.arange(len(rows.starts)), max_tokens=limit, world_size=ranks)
            flat = [share for step in shares for share in step]
            dealt = np.concatenate(flat)
            assert sorted(dealt) == np.flatnonzero(rows.inputs).tolist()
            for share in flat:
                assert rows.inputs[share].sum() <= limit
            for trajectory in np.unique(rows.trajectory):
                own = set(np.flatnonzero((rows.trajectory == trajectory) & (rows.inputs > 0)))
                if rows.inputs[list(own)].sum() <= limit:
                    assert sum(bool(own & set(share)) for share in flat) <= 1


def test_a_loss_of_whole_trajectories_refuses_threads_that_no_micro_batch_can_take(
    folder: str,
) -> None:
    batch = cut_batch(batch_of(10), whole_openings=True)
    case = {"ppo_max_token_len_per_gpu": 20, "policy_loss": {"loss_mode": "gspo"}}
    with pytest.raises(ConfigError, match="reads all tokens of a trajectory at once"):
        trained(case, folder, [batch])
    trained({"ppo_max_token_len_per_gpu": 20}, folder, [batch])


def test_an_opening_without_tokens_is_refused() -> None:
    sample = random_samples(2, [1])[0]
    empty = Trajectory((Thread((), tokens_of()),))
    with pytest.raises(ValueError, match="opening of a thread of sample 0 has no tokens"):
        rows_of_samples([replace(sample, trajectories=(empty,))])
