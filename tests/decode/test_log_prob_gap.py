"""The log-probs of both engines agree on the same weights.

If the weights differ, the guard raises an alarm.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.config import Config, GuardConfig, OptimConfig
from millrace.decode import engine as torch_rollout
from millrace.observe.gap import LEAST
from millrace.observe.guard import Guard
from millrace.observe.metrics import GAP_LIMIT, GAP_TOKENS
from millrace.ports import StepReport, TrainBatch
from millrace.train.fsdp import engine as fsdp_train
from millrace.types import Prompt, Sample, SamplingParams, Score, Trajectory, floats_of
from tests.decode.helpers import folder, prompt

METRIC = "actor/log_prob_gap_same_version"


def config_of(temperature: float) -> Config:
    return Config(
        trainer={"device": "cpu"},
        rollout={
            "temperature": temperature,
            "max_prompt_length": 32,
            "max_response_length": 24,
            "max_num_seqs": 16,
            "n": 4,
        },
        actor={"ppo_mini_batch_size": 8},
    )


class Pair:
    """A rollout engine and a train engine that start with the same weights."""

    def __init__(self, temperature: float) -> None:
        self.config = config_of(temperature)
        model = str(folder())
        self.rollout = torch_rollout.build(self.config.sides, self.config.model, model)
        self.train = fsdp_train.build(self.config, model, rank=0, world_size=1)

    async def samples(self) -> tuple[Sample, ...]:
        """Draw samples with the rollout engine, which labels its weights as version 0."""
        temperature = self.config.rollout.temperature

        async def trajectory(i: int, j: int) -> Trajectory:
            params = SamplingParams(24, temperature, seed=100 * i + j)
            return Trajectory.of(
                await self.rollout.generate(prompt(i), params, f"{i}/{j}"),
                Score(float((i + j) % 2)),
            )

        groups = [await asyncio.gather(*(trajectory(i, j) for j in range(4))) for i in range(8)]
        return tuple(
            Sample(Prompt(i, prompt(i), "", "t"), tuple(group)) for i, group in enumerate(groups)
        )

    async def step(self, lr: float, version: int = 0) -> StepReport:
        self.train.restart(OptimConfig(lr=lr, clip_grad=0.0), 100)
        return await self.train.step(TrainBatch(await self.samples(), version))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_at_lr_0_the_engines_agree_to_1e_5_before_and_after_steps(temperature: float) -> None:
    pair = Pair(temperature)
    # The second time, the tokens are one version old, but the weights have not changed.
    for version in (0, 1):
        report = await pair.step(0.0, version)
        assert report.metrics["actor/rollout_probs_diff_max"] < 1e-5
    samples = await pair.samples()
    ours = [p for row in await pair.train.log_probs(samples) for p in row]
    theirs = [
        p
        for s in samples
        for t in s.trajectories
        for segment in t.segments
        for p in segment.log_probs
    ]
    assert len(ours) > 200
    gap = (torch.tensor(ours) - torch.tensor(theirs)).abs()
    assert float(gap.max()) < 1e-5
    first = await pair.step(0.0, 0)
    assert first.metrics[METRIC] < 1e-5 and float(gap.mean()) == pytest.approx(
        first.metrics[METRIC], rel=1e-3
    )


async def test_the_gap_is_measured_on_tokens_of_the_live_version_before_any_step_alone() -> None:
    pair = Pair(1.0)
    batch = TrainBatch(await pair.samples(), 0)
    pair.train.restart(OptimConfig(lr=1e-3), 100)
    reports = [
        await pair.train.step(batch),
        await pair.train.step(batch),
        await pair.train.step(TrainBatch(batch.samples, 1)),
    ]
    assert [METRIC in report.metrics for report in reports] == [True, False, False]


async def test_rollouts_one_version_behind_raise_the_alarm(tmp_path: Path) -> None:
    """The rollout engine keeps the weights from before a step and labels them as live."""
    pair, guard = Pair(1.0), Guard(GuardConfig())
    limit = {GAP_LIMIT: LEAST["float32"]}
    right = await pair.step(1e-2)
    assert not guard.check(1, right.metrics | limit), "the same weights: no alarm"
    # A new version begins, but the rollout engine never received it.
    pair.train._seen_version = None
    wrong = await pair.step(1e-2)
    assert wrong.metrics[METRIC] > 0.01 and wrong.metrics[GAP_TOKENS] > 100
    (alarm,) = guard.check(2, wrong.metrics | limit)
    assert alarm.name == "log_prob_gap" and guard.began == [alarm] and "rollout" in alarm.cause


async def test_tokens_on_kv_of_older_weights_are_no_measure_of_the_gap() -> None:
    pair = Pair(1.0)
    samples = await pair.samples()
    pair.train.restart(OptimConfig(lr=1e-3), 100)
    old = [with_kv(sample, -1) for sample in samples]
    assert METRIC not in (await pair.train.step(TrainBatch(tuple(old), 0))).metrics
    some = TrainBatch((old[0], *samples[1:]), 1)
    pair.train._seen_version = None
    fresh = tuple(replace_version(sample, 1) for sample in some.samples)
    report = await pair.train.step(TrainBatch(fresh, 1))
    own = sum(t.num_policy_tokens for sample in fresh[1:] for t in sample.trajectories)
    assert report.metrics[GAP_TOKENS] == own


def with_kv(sample: Sample, version: int) -> Sample:
    return _changed(sample, kv_version=version)


def replace_version(sample: Sample, version: int) -> Sample:
    return _changed(sample, version=version)


def _changed(sample: Sample, **changes: Any) -> Sample:
    trajectories = (
        Trajectory.of(tuple(replace(s, **changes) for s in t.segments), t.score)
        for t in sample.trajectories
    )
    return replace(sample, trajectories=tuple(trajectories))


async def test_a_token_to_which_its_engine_gives_no_probability_is_over_every_limit() -> None:
    pair = Pair(1.0)
    first, *others = await pair.samples()
    wrong, *rest = first.trajectories
    (segment,) = wrong.segments
    log_probs = floats_of([-math.inf, *segment.log_probs[1:]])
    spoiled = Trajectory.of((replace(segment, log_probs=log_probs),), wrong.score)
    samples = (replace(first, trajectories=(spoiled, *rest)), *others)
    pair.train.restart(OptimConfig(lr=0.0), 100)
    row = (await pair.train.step(TrainBatch(samples, 0))).metrics
    alarms = Guard(GuardConfig()).check(1, row | {GAP_LIMIT: 1e3})
    assert [alarm.name for alarm in alarms] == ["log_prob_gap"]
