"""Weight sync of a policy with adapters.

The trainer sends the base once and then only adapters. Replicas serve the merged weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from millrace.config import Config, ModelShape
from millrace.decode import engine as torch_rollout
from millrace.errors import SyncError
from millrace.models.model import write_shape
from millrace.ports import TrainBatch
from millrace.run.engines import sync_options
from millrace.sync import collective
from millrace.sync.adapters import LoraStaging
from millrace.sync.buckets import ALIGN
from millrace.sync.collective import Receiver, join_sender
from millrace.sync.proof import bit_sums
from millrace.sync.table import Shards
from millrace.train.fsdp import engine as fsdp_train
from millrace.types import Prompt, Sample, SamplingParams, Trajectory, tokens_of
from tests.sync.fleet import TRAINERS, Fleet, Source, equal, model, regroup
from tests.sync.fleet import fleet as plain_fleet
from tests.train.samples import random_samples
from tests.waiting import HANG_S

RANK, ALPHA = 3, 12.0
ADAPTED = ("layer.0.w", "layer.1.w", "head")
"""The adapted tensors. All are float32 except `head`, which is bfloat16."""


def drawn(seed: int) -> dict[str, Tensor]:
    """Return A and B of every adapted tensor. The second trainer rank has one row of each A."""
    noise, tensors = torch.Generator().manual_seed(seed), {}
    for name in ADAPTED:
        rows, columns = model(0)[name].shape
        tensors[f"{name}.lora_A"] = torch.randn(RANK, columns, generator=noise)
        tensors[f"{name}.lora_B"] = torch.randn(rows, RANK, generator=noise) / 10
    return tensors


@dataclass
class Adapted(Source):
    """A trainer rank with adapters and a frozen base."""

    low_rank: dict[str, Tensor]

    def adapters(self) -> Shards:
        return Source(self.low_rank, self.rank).shards()


def merged(base: dict[str, Tensor], low_rank: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the adapters to the base, in float64."""
    return {
        name: base[name].double()
        + ALPHA / RANK * low_rank[f"{name}.lora_B"].double() @ low_rank[f"{name}.lora_A"].double()
        if name in ADAPTED
        else base[name]
        for name in base
    }


def size(tensors: dict[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


fleet = partial(
    plain_fleet,
    source=lambda rank: Adapted(model(1), rank, drawn(0)),
    model={"lora_rank": RANK, "lora_alpha": ALPHA},
)


def draw(f: Fleet, seed: int) -> dict[str, Tensor]:
    """Give every trainer rank new adapters and return them."""
    low_rank = drawn(seed)
    for source in f.sources:
        source.low_rank = low_rank  # type: ignore[attr-defined]
    return low_rank


@pytest.mark.parametrize("copies", [1, 2])
async def test_after_the_first_version_adapters_alone_are_sent_and_whole_tensors_served(
    copies: int,
) -> None:
    async with fleet(copies=copies) as f:
        for version in range(4):
            low_rank = draw(f, 50 + version)
            before = [{k: t.clone() for k, t in h.live.items()} for h in f.holders]
            sent, received = await f.transfer(version)
            assert all(equal(h.live, b) for h, b in zip(f.holders, before, strict=True)), (
                "a transfer touches nothing live"
            )
            await f.activate(version)
            for holder in f.holders:
                assert holder.live.keys() == model(1).keys() and holder.version == version
                for name, want in merged(model(1), low_rank).items():
                    got = holder.live[name]
                    if name not in ADAPTED:
                        assert torch.equal(got, want)
                    else:
                        # The entries of A and B are of the order of 1 or smaller.
                        tolerance = 2**-8 if got.dtype == torch.bfloat16 else 1e-6
                        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=1e-6)
            meant = size(low_rank) + (0 if version else size(model(1)))
            tensors = len(low_rank) + (0 if version else len(model(1)))
            assert all(meant <= r.bytes < meant + ALIGN * tensors * TRAINERS for r in received)
            assert sum(s.bytes for s in sent) == received[0].bytes
        assert equal(f.holders[0].live, f.holders[1].live)


def flips(target: Any) -> Callable[[Any, Tensor], Any]:
    """Flip one bit of the sender's first bucket, after the sender took its checksums."""
    honest, left = collective.start_broadcast, [1000]

    def broken(group: Any, tensor: Tensor) -> Any:
        if group is target and tensor.dtype == torch.uint8 and left:
            tensor[left.pop()] ^= 4
        return honest(group, tensor)

    return broken


async def test_an_adapter_that_is_corrupted_on_the_way_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet() as f:
        await f.transfer(0)
        await f.activate(0)
        draw(f, 7)
        with monkeypatch.context() as patch:
            patch.setattr(collective, "start_broadcast", flips(f.senders[1]._membership.groups[1]))
            message = r"received weights of version 1 are not the trainer's: layer\.0\.w\.lora_A differ in checksum \(rows of trainer rank 1\)"
            with pytest.raises(SyncError, match=message):
                await f.transfer(1)
        for i, receiver in enumerate(f.receivers):
            with pytest.raises(
                SyncError, match=f"replica {i} cannot serve version 1: its staged version is None"
            ):
                await receiver.activate(1)
        assert all(h.swaps == [0] for h in f.holders)
        low_rank = draw(f, 8)  # the base is still complete
        await f.transfer(2)
        await f.activate(2)
        want = merged(model(1), low_rank)["layer.1.w"]
        torch.testing.assert_close(
            f.holders[0].live["layer.1.w"].double(), want, rtol=1e-6, atol=1e-6
        )


async def test_adapters_of_a_base_that_did_not_arrive_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer does not send the base again."""
    async with fleet() as f:
        monkeypatch.setattr(
            collective, "start_broadcast", flips(f.senders[1]._membership.groups[1])
        )
        sending = asyncio.gather(
            *(asyncio.to_thread(asyncio.run, s.transfer(0)) for s in f.senders)
        )  # type: ignore[arg-type]
        for message in (
            "version 0 are not the trainer's: embed differ",
            "adapters, but their base never arrived whole",
        ):
            found = await asyncio.gather(
                *(r.transfer(0) for r in f.receivers), return_exceptions=True
            )
            assert all(isinstance(e, SyncError) and message in str(e) for e in found), found
            for r in f.receivers:
                with pytest.raises(SyncError, match="staged version is None"):
                    await r.activate(0)
        await sending


@pytest.mark.parametrize("name", ["layer.1.w", "norm"])
async def test_a_tensor_corrupted_while_it_is_staged_is_refused_at_activation(name: str) -> None:
    """This holds for adapted tensors and for others."""
    async with fleet() as f:
        for version in (0, 1):
            draw(f, version)
            await f.transfer(version)
            if version == 0:
                await f.activate(0)
        f.receivers[1].inbox.staged[name].view(torch.int32).view(-1)[0] ^= 1
        await f.receivers[0].activate(1)
        with pytest.raises(
            SyncError, match=rf"replica 1: live weights of version 1 are not the trainer's: {name}"
        ):
            await f.receivers[1].activate(1)
        with pytest.raises(
            SyncError, match="replica 1 cannot serve version 1: its staged version is None"
        ):
            await f.receivers[1].activate(1)


async def test_the_bit_sums_that_vllm_is_proven_by_are_those_of_what_was_staged() -> None:
    async with fleet(rollout={"engine": "vllm"}) as f:
        for version in (0, 1):
            draw(f, version)
            await f.transfer(version)
            for r in f.receivers:
                assert isinstance(r.inbox, LoraStaging) and r.inbox.bit_sums == bit_sums(
                    r.inbox.staged
                )
                assert list(r.inbox.staged) == list(model(1))


async def test_staged_memory_stays_where_it_is() -> None:
    """vLLM records its copies once and repeats them, so the addresses must not change."""
    async with fleet() as f:
        places = []
        for version in range(2):
            await f.transfer(version)
            places.append({name: t.data_ptr() for name, t in f.receivers[0].inbox.staged.items()})
        assert places[0] == places[1]


async def test_the_link_carries_what_a_later_transfer_has() -> None:
    async with fleet() as f:
        await f.transfer(0)
        sending = [asyncio.to_thread(asyncio.run, s.link()) for s in f.senders]  # type: ignore[arg-type]
        reports = await asyncio.gather(*sending, *(r.link() for r in f.receivers))
        _, received = await f.transfer(1)
        assert reports[-1].bytes == received[0].bytes
        await f.activate(1)


SHAPE = ModelShape(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
)


async def test_trainer_and_rollout_engine_agree_on_log_probs_after_every_sync(
    tmp_path: Path,
) -> None:
    write_shape(tmp_path, SHAPE, vocab_size=24, eos_token_id=1, max_position_embeddings=64)
    config = Config(
        trainer={"device": "cpu"},
        rollout={"n": 2, "max_prompt_length": 8, "max_response_length": 25},
        model={"lora_rank": 4},
        actor={"optim": {"lr": 2e-2}},
        sync={"timeout_s": HANG_S},
    )
    torch.set_num_threads(1)
    engine = fsdp_train.build(config, str(tmp_path), rank=0, world_size=1)
    engine.restart(config.actor.optim, 9)
    replica, store = (
        torch_rollout.build(config.sides, config.model, str(tmp_path)),
        dist.HashStore(),
    )
    sender, receiver = await asyncio.gather(
        join_sender(engine, store, 0, sync_options(config)),
        Receiver.join(replica, store, 0, sync_options(config)),
    )
    await regroup([sender], {0: receiver})
    base, seen = {name: own.clone() for name, _, _, _, own in engine.shards()}, []
    prompt = Prompt(0, tokens_of([2, 5, 3]), "", "d")
    for version in range(4):
        sending = asyncio.to_thread(asyncio.run, sender.transfer(version))  # type: ignore[arg-type]
        sent, _ = await asyncio.gather(sending, receiver.transfer(version))
        await receiver.activate(version)
        seen.append(sent.bytes)
        for name, tensor in engine.full_weights():
            assert torch.equal(replica.weights()[name], tensor), name
        segments = await replica.generate(
            prompt.tokens, SamplingParams(20, ignore_eos=True, seed=version), f"r{version}"
        )
        found = (segments,) if not isinstance(segments, tuple) else segments
        sample = Sample(prompt, (Trajectory.of(found),))
        drawn = [p for segment in found for p in segment.log_probs]
        assert len(drawn) == 20
        (own,) = await engine.log_probs((sample,))
        assert own == pytest.approx(drawn, abs=1e-5)
        await engine.step(TrainBatch(random_samples(version, [4, 4]), version))
    assert all(torch.equal(own, base[name]) for name, _, _, _, own in engine.shards())
    moved = max(float((t - base[name]).abs().max()) for name, t in engine.full_weights())
    assert moved > 1e-2
    low_rank = sum(4 * own.numel() for *_, own in engine.adapters())
    assert seen[1:] == [seen[1]] * 3 and seen[0] > seen[1] >= low_rank
    await replica.close()
