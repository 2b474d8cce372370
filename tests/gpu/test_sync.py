"""CUDA IPC between two processes on one GPU.

The rollout process maps the trainer's memory and loads weights from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import TCPStore

from millrace.config import Config
from millrace.run.engines import sync_options
from millrace.sync.buckets import checksum, plan, specs_of
from millrace.sync.ipc import IpcSender, IpcStaging
from millrace.sync.proof import bit_sums
from millrace.sync.table import Shards

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
CONFIG: dict[str, Any] = {
    "rollout": {"engine": "vllm"},
    "async_training": {"placement": "colocated"},
    "sync": {"bucket_mb": 1, "timeout_s": 60},
}
AGREED = sync_options(Config.model_validate(CONFIG))
VERSIONS = 3


def model(seed: int) -> dict[str, Tensor]:
    noise = torch.Generator(CUDA).manual_seed(seed)
    sizes = {f"layer.{i}": (300 + i, 700) for i in range(9)}
    return {
        name: torch.randn(size, generator=noise, device=CUDA).to(torch.bfloat16)
        for name, size in sizes.items()
    }


class Source:
    device = CUDA

    def __init__(self) -> None:
        self.tensors = model(0)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def shards(self) -> Shards:
        yield from ((name, tuple(t.shape), t.dtype, 0, t) for name, t in self.tensors.items())


def replica(_: int, port: int) -> None:
    store, live = TCPStore("127.0.0.1", port, None, False), {}

    def load(weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            live[name] = tensor.clone()

    inbox = IpcStaging.join(specs_of(model(0)), store, CUDA, 0, AGREED, load)
    store.set("mapped", "")
    inbox.regroup(0, [0])
    for version in range(VERSIONS):
        inbox.receive(version)
        want = model(version)
        assert all(torch.equal(live[name], tensor) for name, tensor in want.items())
        assert inbox.bit_sums == bit_sums(want)


def test_weights_cross_by_mapped_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    waiter = TCPStore("127.0.0.1", store.port, None, False)
    other = mp.spawn(replica, args=(store.port,), join=False)

    async def main() -> None:
        source = Source()
        sender = await IpcSender.join(source, store, 0, AGREED)  # type: ignore[arg-type]
        await asyncio.to_thread(waiter.wait, ["mapped"])
        await sender.regroup(0, [0])
        for version in range(VERSIONS):
            source.tensors = model(version)
            await sender.transfer(version)

    asyncio.run(main())
    assert other.join(60)


def test_sums_on_a_gpu_are_those_on_a_cpu() -> None:
    tensors = model(3) | {
        "odd": torch.randn(33, 7, device=CUDA),
        "bytes": torch.arange(77, dtype=torch.uint8, device=CUDA),
        "none": torch.empty(0, 5, dtype=torch.bfloat16, device=CUDA),
        "wide": torch.randint(-(1 << 62), 1 << 62, (40, 2048), device=CUDA),
    }
    for bucket in plan(specs_of(tensors), 1 << 20):
        buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=CUDA)
        for name, view in bucket.views(buffer).items():
            view.copy_(tensors[name])
        assert torch.equal(
            bucket.sums(buffer, bits=True).cpu(), bucket.sums(buffer.cpu(), bits=True)
        )
    assert bit_sums(tensors) == bit_sums({name: tensor.cpu() for name, tensor in tensors.items()})
    assert all(torch.equal(checksum(t).cpu(), checksum(t.cpu())) for t in tensors.values())
    # Parts of a tensor start anywhere. Columns are not contiguous.
    line = torch.randn(4_194_400, device=CUDA).to(torch.bfloat16)
    parts = {str(k): line[k : 8 * 4096 * 128 + k] for k in (0, 1, 7, 8)} | {"t": line[:999_999]}
    parts["columns"] = line[:1_000_000].view(1000, 1000)[:, 3:900]
    assert bit_sums(parts) == bit_sums({name: part.cpu() for name, part in parts.items()})
