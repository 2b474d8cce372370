"""The parts of a train step's time, on a real engine."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.config import Config, OptimConfig
from millrace.observe.timing import ActorClock
from millrace.ports import TrainBatch
from millrace.train.experience import Models
from millrace.train.fsdp import engine as fsdp_train
from millrace.train.timed import timed
from millrace.waits.registry import Registry, acting, part, within
from tests.decode.helpers import folder
from tests.train.samples import random_samples

CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "bypass": ({}, set()),
    "several steps on a batch": (
        {"async_training": {"use_rollout_log_probs": False}},
        {"old_log_prob"},
    ),
    "reference": ({"actor": {"use_kl_loss": True}}, {"ref"}),
    "critic": ({"algorithm": {"adv_estimator": "gae"}}, {"values", "update_critic"}),
    "critic alone learns": (
        {"algorithm": {"adv_estimator": "gae"}, "trainer": {"critic_warmup": 9}},
        {"values", "update_critic"},
    ),
    "everything": (
        {
            "actor": {"use_kl_loss": True},
            "algorithm": {"adv_estimator": "gae"},
            "async_training": {"use_rollout_log_probs": False},
        },
        {"old_log_prob", "ref", "values", "update_critic"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_reports_the_parts_that_ran_and_no_others(case: str) -> None:
    torch.set_num_threads(1)
    sections, parts = CASES[case]
    config = Config(
        trainer={"device": "cpu"} | sections.get("trainer", {}),
        rollout={"max_prompt_length": 8, "max_response_length": 25},
        actor={"ppo_mini_batch_size": 3} | sections.get("actor", {}),
        algorithm=sections.get("algorithm", {}),
        async_training=sections.get("async_training", {}),
    )
    engine = fsdp_train.build(config, str(folder()), rank=0, world_size=1)
    engine.restart(OptimConfig(lr=1e-3), 10)
    start = time.perf_counter()
    report = asyncio.run(engine.step(TrainBatch(random_samples(3, [4, 1, 3, 5, 2]), 2)))
    wall = time.perf_counter() - start
    assert set(report.seconds) == parts | {"adv", "update_actor"}
    assert all(seconds > 0 for seconds in report.seconds.values())
    assert sum(report.seconds.values()) <= wall


class Clocked:
    """A model whose forward pass takes some seconds of a clock."""

    steps, routed = 3, None

    def __init__(self, now: list[float], seconds: float) -> None:
        self.now = now
        self.seconds = seconds

    def tokens(self, *args: Any, **options: Any) -> list[Tensor]:
        self.now[0] += self.seconds
        return [torch.tensor([self.seconds])]


def test_each_model_counts_for_its_own_part_and_suspends_the_one_around_it() -> None:
    now = [0.0]
    registry, clock = Registry("driver", lambda: now[0]), ActorClock(0.0, "step")
    models = timed(Models(Clocked(now, 1.0), Clocked(now, 2.0), Clocked(now, 4.0)))
    assert models.critic is not None and models.reference is not None
    rows: Any = None
    with within(registry.root), acting("step"), registry.watched_by(clock), part("adv"):
        now[0] += 0.5
        outputs = [
            models.policy.tokens(rows, temperature=1.0, squares=True),
            models.reference.tokens(rows, temperature=1.0),
            models.critic.tokens(rows, temperature=1.0),
            models.policy.tokens(rows, temperature=1.0),
        ]
    assert [found.item() for (found,) in outputs] == [1.0, 4.0, 2.0, 1.0]
    seconds = {"other": 0, "adv": 0.5, "old_log_prob": 2.0, "ref": 4.0, "values": 2.0}
    assert clock.flush(now[0]) == seconds
    assert models.policy.steps == 3
    alone = timed(Models(Clocked(now, 1.0), None, None))
    assert alone.critic is None and alone.reference is None
