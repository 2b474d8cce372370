"""Routers of mixtures where ranks, adapters and references meet them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from millrace.observe.metrics import GAP_TOKENS
from millrace.ports import TrainBatch
from millrace.train.fsdp.engine import build
from millrace.train.fsdp.policy import PackedPolicy
from millrace.train.packing import pack
from millrace.train.routing import room
from millrace.train.rows import rows_of_samples
from tests.train import cases as train_cases
from tests.train.fsdp import lora_cases
from tests.train.mixtures import routed
from tests.train.samples import random_samples


@pytest.mark.parametrize("experts", [256, 257])
def test_ranks_can_add_up_the_experts_of_their_tokens(experts: int) -> None:
    """Neither gloo nor NCCL adds up int16."""
    found = torch.from_numpy(room(2, 3, experts))
    found[1, 2] = experts - 1
    gloo: Any = dist.ProcessGroupGloo
    gloo(HashStore(), 0, 1).allreduce([found]).wait()
    assert found[1, 2] == experts - 1


def test_a_balance_loss_counts_on_a_rank_whose_tokens_predict_no_trained_one(folder: str) -> None:
    """Such a rank of sequence parallelism may have a prompt alone."""
    policy = PackedPolicy(train_cases.model_of({"model": "mixtral"}, folder))
    assert policy.routers is not None
    policy.routers.balance = 1.0
    rows = rows_of_samples(random_samples(1, [2, 3]))
    batch = pack(rows, np.argsort(-rows.inputs), train_cases.CPU, padded=True)
    sums = []
    for one in (batch, replace(batch, select=batch.select[:0], targets=batch.targets[:0])):
        policy(one, 1.0)
        sums.append(policy.routers.take())
    assert sums[0][:, -1].all() and not sums[1][:, -1].any()
    assert sums[0][:, -4].all() and torch.equal(sums[1][:, -4], sums[0][:, -4])


def test_a_reference_with_adapters_does_not_replay_the_experts_of_the_policy(folder: str) -> None:
    config = lora_cases.config_of({}, actor={"use_kl_loss": True})
    engine = build(config, f"{folder}/qwen3_moe", rank=0, world_size=1)
    engine.restart(train_cases.OPTIM, 1)
    rows = rows_of_samples(routed(random_samples(1, [2, 3])))
    own = engine.actor.tokens(replace(rows, experts=None), temperature=1.0)[0]
    assert not torch.equal(engine.actor.tokens(rows, temperature=1.0)[0], own)
    assert engine.reference is not None
    assert torch.equal(engine.reference.tokens(rows, temperature=1.0)[0], own)


@pytest.mark.parametrize("replay", ["R3", "disabled"])
def test_with_r3_the_gap_covers_no_response_that_an_older_version_began(
    replay: str, folder: str
) -> None:
    """After an interruption, vLLM reads such a response with experts that nobody replays."""
    case = {"model": "qwen3_moe", "ppo_mini_batch_size": 100, "router_replay": replay}
    engine = train_cases.engine_of(case, folder, 0)
    samples = routed(random_samples(10, [4, 4, 5]))
    metrics = asyncio.run(engine.step(TrainBatch(samples, version=1))).metrics
    drawn = [(t.versions, t) for s in samples for t in s.trajectories if t.versions]
    whole = sum(t.num_policy_tokens for versions, t in drawn if min(versions) >= 1)
    later = sum(
        len(segment.tokens)
        for versions, t in drawn
        if min(versions) == 0
        for segment in t.segments
        if segment.version == 2
    )
    assert whole and later
    assert metrics[GAP_TOKENS] == whole + (0 if replay == "R3" else later)
