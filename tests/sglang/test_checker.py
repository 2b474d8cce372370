"""Weights after a sync, proven by SGLang's own checker."""

from __future__ import annotations

import asyncio

import pytest

from millrace.errors import SyncError
from tests.serving.replica import Replica
from tests.sglang.checker import wrong

pytestmark = pytest.mark.xdist_group("engines")


async def test_sglangs_checker_finds_the_weights_of_the_trainer_after_each_sync(
    replica: Replica, runner: asyncio.Runner
) -> None:
    for version, seed in ((300, 1), (301, 2), (302, 1)):
        await replica.publish(version, seed)
        assert not await wrong(replica, seed)
    others = await wrong(replica, 2)
    assert {"model.embed_tokens.weight", "model.layers.1.self_attn.qkv_proj.weight"} <= others


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"]
)
async def test_both_proofs_find_one_tensor_that_a_sync_left_out(
    replica: Replica, runner: asyncio.Runner, name: str
) -> None:
    await replica.publish(310, 1)
    await replica.transfer(311, 2)
    await replica.engine.call_workers("leave_out", name)
    with pytest.raises(SyncError, match=f"version 311 are not the trainer's: {name} differ"):
        await replica.receiver.activate(311)
    assert await wrong(replica, 2) == {name}
    await replica.publish(312, 2)
    assert not await wrong(replica, 2)


async def test_only_the_checker_finds_rows_in_another_order(
    replica: Replica, runner: asyncio.Runner
) -> None:
    """The sums of bits are the same in any order, so the loader's places are for this proof."""
    name = "model.layers.0.self_attn.qkv_proj.weight"
    await replica.publish(320, 1)
    await replica.engine.call_workers("exchange_rows", name)
    await replica.transfer(321, 1)
    assert await wrong(replica, 1) == {name}
    await replica.receiver.activate(321)
    assert not await wrong(replica, 1)
