"""The handover between two processes on one GPU, over real gloo messages.

The slots are in host memory that both sides share.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from millrace import codec
from millrace.config import Config
from millrace.errors import BrokenTransfer, SyncError
from millrace.run.engines import sync_options
from millrace.serving.live_weights import LiveWeights
from millrace.sync import ipc
from millrace.sync.buckets import plan, specs_of
from millrace.sync.eight_bit import in_eight_bits, sums_of
from millrace.sync.ipc import IpcSender, IpcStaging, fits
from millrace.sync.membership import Membership
from millrace.sync.proof import bit_sums, not_live
from millrace.sync.table import Shards
from tests.waiting import HANG_S

CPU = torch.device("cpu")


def model(seed: int) -> dict[str, Tensor]:
    """Return a model that needs more buckets (5) than there are slots (2)."""
    noise = torch.Generator().manual_seed(seed)
    return {
        f"layer.{i}": torch.randn(40 + i, 50, generator=noise).to(torch.bfloat16) for i in range(9)
    }


@dataclass
class Source:
    tensors: dict[str, Tensor]
    device = torch.device("cpu")

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def shards(self) -> Shards:
        raise AssertionError("whole tensors are handed over")


@dataclass
class Pair:
    sender: IpcSender
    inbox: IpcStaging
    source: Source
    slots: list[Tensor]
    live: dict[str, Tensor] = field(default_factory=dict)

    async def hand_over(self, version: int) -> int:
        sending = asyncio.to_thread(asyncio.run, self.sender.transfer(version))  # type: ignore[arg-type]
        report, received = await asyncio.gather(
            sending, asyncio.to_thread(self.inbox.receive, version)
        )
        assert report.bytes == received  # type: ignore[attr-defined]
        return received


def pair(
    on_load: Callable[[Pair, str, Tensor], None] = lambda p, name, tensor: None,
    prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> Pair:
    source = Source(model(1))
    buckets = plan(specs_of(source.tensors), 1 << 14)
    assert len(buckets) == 5
    slots = [torch.zeros(max(b.num_bytes for b in buckets), dtype=torch.uint8) for _ in range(2)]

    def load(weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            on_load(made, name, tensor)
            made.live[name] = tensor.clone()

    store, agreed = dist.HashStore(), sync_options(Config(sync={"timeout_s": HANG_S}))
    first = Membership(store, agreed, CPU, [0], "trainer rank 0")
    second = Membership(store, agreed, CPU, [0], "replica 3")
    made = Pair(
        IpcSender(source, first, 0, buckets, slots, lambda members: "replica 3"),  # type: ignore[arg-type]
        IpcStaging(second, 0, buckets, slots, load, 3, prepare),
        source,
        slots,
    )

    async def meet() -> None:
        receiving = asyncio.to_thread(made.inbox.regroup, 1, [3])
        await asyncio.gather(made.sender.regroup(1, [3]), receiving)

    asyncio.run(meet())
    return made


def test_what_is_loaded_is_what_the_trainer_has_version_after_version() -> None:
    p = pair()
    for version in (0, 1, 2):
        p.source.tensors = model(10 + version)
        asyncio.run(p.hand_over(version))
        assert p.inbox.version == version
        assert p.live.keys() == p.source.tensors.keys()
        assert all(torch.equal(p.live[name], tensor) for name, tensor in p.source.tensors.items())
        assert p.inbox.bit_sums == bit_sums(p.source.tensors)


def test_weights_in_8_bits_are_those_of_the_version_bucket_by_bucket() -> None:
    names = {"layer.1", "layer.4", "layer.8"}
    p = pair(prepare=lambda weights: in_eight_bits(weights, names, CPU))
    for version in (0, 1):
        p.source.tensors = model(10 + version)
        asyncio.run(p.hand_over(version))
        want = in_eight_bits(p.source.tensors, names, CPU)
        assert p.live.keys() == want.keys()
        assert bit_sums(p.live) == bit_sums(want)
        assert p.inbox.bit_sums == sums_of(want)


def test_a_slot_is_not_written_before_it_was_loaded() -> None:
    """A slow replica still loads the content that its slot had when the sender announced it."""
    import time

    p = pair(lambda p, name, tensor: time.sleep(0.05))
    asyncio.run(p.hand_over(1))
    assert all(torch.equal(p.live[name], tensor) for name, tensor in p.source.tensors.items())


async def test_a_bucket_that_is_not_what_was_sent_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filled, send = threading.Semaphore(0), ipc.start_send

    def counted(pair: Any, tensor: Tensor, to: int) -> Any:
        if to == 1:  # from the sender
            filled.release()
        return send(pair, tensor, to)

    monkeypatch.setattr(ipc, "start_send", counted)

    def flip(p: Pair, name: str, tensor: Tensor) -> None:
        """Flip a bit of the second bucket while the first tensor is loaded."""
        p.slots[1][200] ^= name == "layer.0"

    p = await asyncio.to_thread(pair, flip)
    sending = asyncio.ensure_future(asyncio.to_thread(asyncio.run, p.sender.transfer(7)))  # type: ignore[arg-type]
    for _ in p.slots:  # both slots are full
        await asyncio.to_thread(filled.acquire)
    with pytest.raises(
        SyncError,
        match=r"replica 3: received weights of version 7 are not the trainer's: layer\.\d differs",
    ):
        await asyncio.to_thread(p.inbox.receive, 7)
    assert p.inbox.version is None
    # No message says that the slot is loaded. The sender waits until the pair is left.
    await asyncio.to_thread(p.inbox.leave)
    with pytest.raises(SyncError, match="broke off"):
        await sending


class Model(torch.nn.Module):
    """A served model. A transfer may break off when it has replaced half of the layers."""

    config = SimpleNamespace(model_type="llama")
    breaks = False

    def __init__(self) -> None:
        super().__init__()
        zeros = (torch.zeros_like(t) for t in model(0).values())
        self.layer = torch.nn.ParameterList(torch.nn.Parameter(z, False) for z in zeros)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if self.breaks and name == "layer.5":
                raise BrokenTransfer("a rank was lost")
            self.get_parameter(name).copy_(tensor)


def test_a_replica_takes_the_next_transfer_after_one_that_broke_off() -> None:
    """Its weights are then of two versions, and no fault changed them."""
    p, live = pair(), LiveWeights()
    live.model, live.inbox, live.shard, live.device = Model(), p.inbox, 0, CPU
    live._store = dist.HashStore()  # type: ignore[assignment]
    live._key, live._replica = "report", 3
    live._staging, live._paired = threading.Lock(), True
    live._stream = live._proof_stream = None
    p.inbox._load = live._load

    async def take(version: int) -> dict[str, Any]:
        p.source.tensors = model(10 + version)
        transfer = p.sender.transfer(version)
        sent = asyncio.ensure_future(asyncio.to_thread(asyncio.run, transfer))  # type: ignore[arg-type]
        live.stage_weights(version, version)
        await asyncio.to_thread(live._store.wait, [f"report/{version}"])
        found: dict[str, Any] = json.loads(live._store.get(f"report/{version}"))
        receiving = asyncio.to_thread(p.inbox.regroup, version, [3])
        await asyncio.gather(p.sender.regroup(version, [3]), receiving)
        await asyncio.gather(sent, return_exceptions=True)
        return found

    assert asyncio.run(take(2))["version"] == 2
    live.activate_weights(2)
    live.model.breaks = True
    assert asyncio.run(take(3))["broken"]
    live.model.breaks = False
    assert asyncio.run(take(4))["version"] == 4
    sent, served, fused = live.activate_weights(4)
    assert not not_live(sent, [served], fused)
    live.model.layer[2].view(-1)[0] += 1
    assert "layer.2 changed after the sync" in asyncio.run(take(5))["error"]


def test_it_is_for_vllm_on_shared_gpus() -> None:
    def config(engine: str, placement: str) -> Config:
        return Config.model_validate(
            {"rollout": {"engine": engine}, "async_training": {"placement": placement}}
        )

    cuda = torch.device("cuda", 0)
    assert fits(sync_options(config("vllm", "colocated")), cuda)
    assert not fits(sync_options(config("vllm", "separate")), cuda)
    assert not fits(sync_options(config("torch", "colocated")), cuda)
    assert not fits(sync_options(config("vllm", "colocated")), CPU)


CUDA_ARGUMENTS = (
    Tensor,
    torch.Size([96]),
    (1,),
    32,
    torch.storage.TypedStorage,
    torch.uint8,
    5,
    b"c" + bytes(range(64)),
    4096,
    1024,
    False,
    b"/torch_counter",
    7,
    bytes(64),
    True,
)
"""The arguments with which torch describes 96 bytes on GPU 5."""


def test_a_slot_is_mapped_with_what_torch_said_of_it_on_the_device_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = list(inspect.signature(ipc.rebuild_cuda_tensor).parameters)
    assert len(names) == len(CUDA_ARGUMENTS), "another torch: look at Slot.of and Slot.mapped"
    said = dict(zip(names, CUDA_ARGUMENTS, strict=True))
    monkeypatch.setattr(ipc, "reduce_tensor", lambda slot: (None, CUDA_ARGUMENTS))
    monkeypatch.setattr(
        ipc, "rebuild_cuda_tensor", lambda *given: dict(zip(names, given, strict=True))
    )
    told = codec.pack([ipc.Slot.of(torch.zeros(96, dtype=torch.uint8))] * 2)
    assert [slot.mapped(2) for slot in ipc.slots_of(told, 96)] == [said | {"storage_device": 2}] * 2


def test_what_the_store_says_of_slots_is_read_and_never_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"

    class Harm:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(touched),)

    good = {
        "handle": b"h",
        "storage_bytes": 96,
        "storage_offset": 0,
        "offset": 0,
        "num_bytes": 96,
        "counter": b"c",
        "counter_offset": 0,
        "event": b"e",
        "event_needed": False,
    }
    assert len(ipc.slots_of(codec.pack([good, good]), 96)) == 2
    wrong = [{"offset": 1}, {"offset": -1}, {"num_bytes": 95}, {"handle": 3}, {"more": 1}]
    bad = [codec.pack([good, good | change]) for change in wrong]
    for data in [*bad, codec.pack([good]), pickle.dumps([Harm()]), b""]:
        with pytest.raises(ValueError):
            ipc.slots_of(data, 96)
    assert not touched.exists()


def test_slots_that_are_none_are_a_sync_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_name", lambda device: "GPU-1")
    store = dist.HashStore()
    store.set("millrace/sync/ipc/GPU-1", pickle.dumps([1]))  # type: ignore[arg-type]
    with pytest.raises(SyncError, match="replica 3: the store has no slots of a trainer rank on"):
        IpcStaging.join(
            specs_of(model(1)), store, CPU, 3, sync_options(Config()), lambda weights: None
        )
