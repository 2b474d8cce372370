"""Weights between two processes on one GPU: the trainer rank's buckets are mapped into the replica's worker, and loaded from there.

For colocated placement, where the replica decodes nothing meanwhile: no second copy of the weights is staged. Every trainer rank
gathers whole tensors into one of two slots of GPU memory; a pair of gloo messages for each bucket says that it is there, with
its checksums, and that it is loaded. Who shares a GPU is found by its UUID.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from millrace.config import Config
from millrace.errors import SyncError
from millrace.ports import TransferReport, WeightSource
from millrace.sync.buckets import Bucket, Spec, plan
from millrace.sync.collective import tell_specs
from millrace.sync.groups import finish, make_group, receive, start_send, wait_for_device
from millrace.types import PolicyVersion

_SLOTS = 2
_HANDLES = "millrace/sync/ipc"
_CPU = torch.device("cpu")
_DEVICE = 6
"""Which argument of torch's rebuild function is the device's number: that of the process that maps the memory."""


def fits(config: Config, device: torch.device) -> bool:
    """Whether both sides share GPUs, and the replica can map the trainer's memory."""
    return config.schedule.colocated and config.rollout.engine == "vllm" and device.type == "cuda"


class IpcSender:
    """One trainer rank's end, to the one replica device that shares its GPU."""

    def __init__(
        self, source: WeightSource, pair: Any, buckets: list[Bucket], slots: list[Tensor]
    ) -> None:
        self._source = source
        self._pair = pair
        self._buckets = buckets
        self._slots = slots

    @classmethod
    async def join(cls, source: WeightSource, store: Any, rank: int, config: Config) -> IpcSender:
        """Say where the slots are, and wait for who maps them."""
        device = source.device
        buckets = plan(tell_specs(source.shards(), store, rank), config.sync.bucket_mb << 20)
        largest = max(b.num_bytes for b in buckets)
        slots = [torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(_SLOTS)]
        name = _name(device)
        store.set(f"{_HANDLES}/{name}", pickle.dumps([reduce_tensor(slot) for slot in slots]))
        pair = await asyncio.to_thread(make_group, store, name, _CPU, 0, 2, config.sync.timeout_s)
        return cls(source, pair, buckets, slots)

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Hand over the current weights as `version`, bucket by bucket. Collective over the trainer's ranks."""
        start = time.perf_counter()
        weights = self._source.full_weights()
        told: list[tuple[Any, Tensor]] = []
        for k, bucket in enumerate(self._buckets):
            if k >= _SLOTS:
                receive(self._pair, torch.zeros(1), 1)  # the slot's last bucket is loaded
            buffer = self._slots[k % _SLOTS][: bucket.num_bytes].zero_()
            views = bucket.views(buffer)
            for spec in bucket.specs:
                name, tensor = next(weights)
                if name != spec.name:
                    raise SyncError(f"the train engine sends {name} where the plan has {spec.name}")
                views[name].copy_(tensor)
            sums = bucket.sums(buffer).cpu()  # when they are there, so is the bucket
            told.append((start_send(self._pair, sums, 1), sums))
        for _ in self._buckets[-_SLOTS:]:
            receive(self._pair, torch.zeros(1), 1)
        for work, _ in told:
            finish(work)
        return TransferReport(sum(b.num_bytes for b in self._buckets), time.perf_counter() - start)

    async def link(self) -> TransferReport:
        """Copy as many bytes within the GPU as a transfer does."""
        wait_for_device(self._slots[0].device)
        start = time.perf_counter()
        for bucket in self._buckets:
            self._slots[1][: bucket.num_bytes].copy_(self._slots[0][: bucket.num_bytes])
        wait_for_device(self._slots[0].device)
        return TransferReport(sum(b.num_bytes for b in self._buckets), time.perf_counter() - start)

    async def transport(self) -> str:
        """What it is called in reports."""
        return "cuda ipc"


class IpcInbox:
    """What one device of a replica gets from the trainer rank on the same GPU: loaded as it comes, into the live weights."""

    def __init__(
        self,
        pair: Any,
        buckets: list[Bucket],
        slots: list[Tensor],
        load: Callable[[Iterator[tuple[str, Tensor]]], Any],
        replica: int,
    ) -> None:
        self.version: PolicyVersion | None = None
        self.bit_sums: dict[str, int] = {}
        """`proof.bit_sum` of every tensor that came, by name."""
        self._pair = pair
        self._buckets = buckets
        self._slots = slots
        self._load = load
        self._replica = replica

    @classmethod
    def join(
        cls,
        specs: list[Spec],
        store: Any,
        device: torch.device,
        replica: int,
        config: Config,
        load: Callable[[Iterator[tuple[str, Tensor]]], Any],
    ) -> IpcInbox:
        """Map the slots of the trainer rank on this GPU. `load` puts tensors into the live model."""
        name = _name(device)
        try:
            handles = pickle.loads(store.get(f"{_HANDLES}/{name}"))
        except RuntimeError as error:  # the store's time is up
            raise SyncError(
                f"replica {replica}: no trainer rank came to its GPU {name}: {error}"
            ) from error
        slots = []
        for rebuild, arguments in handles:
            here = list(arguments)
            here[_DEVICE] = device.index
            slots.append(rebuild(*here))
        pair = make_group(store, name, _CPU, 1, 2, config.sync.timeout_s)
        return cls(pair, plan(specs, config.sync.bucket_mb << 20), slots, load, replica)

    def receive(self, version: PolicyVersion) -> int:
        """Load `version` and prove what came; returns its bytes. Blocks."""
        self.version, self.bit_sums = None, {}
        loaded: list[tuple[Any, Tensor]] = []
        for k, bucket in enumerate(self._buckets):
            told = receive(self._pair, torch.zeros(len(bucket.specs), 2, dtype=torch.int64), 0)
            buffer = self._slots[k % _SLOTS][: bucket.num_bytes]
            sums = bucket.sums(buffer, bits=True).cpu()
            wrong = (sums[:, :2] != told).any(dim=1).nonzero().flatten().tolist()
            if wrong:
                raise SyncError(
                    f"replica {self._replica}: received weights of version {version} are not the trainer's: "
                    f"{bucket.specs[wrong[0]].name} differs in checksum; it must not serve them"
                )
            views = bucket.views(buffer)
            self._load(iter(views.items()))
            self.bit_sums |= zip(views, sums[:, 2].tolist(), strict=True)
            wait_for_device(buffer.device)
            word = torch.zeros(1)
            loaded.append((start_send(self._pair, word, 0), word))
        for work, _ in loaded:
            finish(work)
        self.version = version
        return sum(b.num_bytes for b in self._buckets)

    def link(self) -> int:
        """`IpcSender.link` needs nobody here."""
        return sum(b.num_bytes for b in self._buckets)


def _name(device: torch.device) -> str:
    """The same for every process on this GPU, whatever number it has there."""
    return str(torch.cuda.get_device_properties(device).uuid)
