"""Weights from the train engine's ranks to every replica, over persistent process groups (gloo on CPUs, NCCL on GPUs).

Each trainer rank has a group of its own with all replicas and sends every world-size-th bucket. Received weights are
staged beside the live ones while rollouts go on (`transfer`), then copied over them between two tokens (`activate`). The
sender's checksums travel with the weights; a replica proves them on what it staged, and again on its live tensors before
it serves the version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from millrace.config import Config
from millrace.errors import SyncError
from millrace.ports import TransferReport, WeightHolder
from millrace.sync.buckets import Bucket, Spec, checksum, plan, specs_of
from millrace.types import PolicyVersion

_PLAN = "millrace/sync/plan"


class WeightSource(Protocol):
    """The train engine as a sender sees it."""

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor whole, in the serving dtype, in model order. Collective over the trainer's ranks."""
        ...


class Sender:
    """One trainer rank's end."""

    def __init__(
        self, source: WeightSource, group: Any, buckets: list[Bucket], rank: int, world_size: int, wire: torch.device
    ) -> None:
        self._source = source
        self._group = group
        self._wire = wire
        self._buckets = buckets
        self._rank = rank
        self._world_size = world_size
        self._num_tensors = sum(len(b.specs) for b in buckets)

    @classmethod
    async def join(cls, source: WeightSource, store: Any, rank: int, config: Config) -> Sender:
        """Meet the replicas. Rank 0 tells the plan's tensors."""
        tensors = dict(source.full_weights())
        specs = specs_of(tensors)
        wire = wire_device(config, next(iter(tensors.values())).device)
        if rank == 0:
            store.set(_PLAN, msgspec.json.encode(specs))
        group = await asyncio.to_thread(_group, store, wire, rank, 0, 1 + config.rollout_devices, config.sync.timeout_s)
        return cls(source, group, plan(specs, config.sync.bucket_mb << 20), rank, config.trainer_ranks, wire)

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Send the current weights as `version`."""
        start = time.perf_counter()
        sums = None
        weights = self._source.full_weights()
        index, sent = 0, 0
        for k, bucket in enumerate(self._buckets):
            mine = k % self._world_size == self._rank
            buffer, views = None, {}
            for spec in bucket.specs:
                name, tensor = next(weights)
                if name != spec.name:
                    raise SyncError(f"the train engine sends {name} where the plan has {spec.name}")
                if sums is None:
                    sums = torch.zeros(self._num_tensors, 2, dtype=torch.int64, device=self._wire)
                if mine:
                    if buffer is None:
                        buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=self._wire)
                        views = bucket.views(buffer)
                    views[name].copy_(tensor)
                    sums[index] = checksum(views[name])
                index += 1
            if buffer is not None:
                _broadcast(self._group, buffer)
                sent += bucket.num_bytes
        if sums is not None:
            _broadcast(self._group, sums)
        return TransferReport(sent, time.perf_counter() - start)


class Inbox:
    """What one receiving device gets: buckets staged beside the live weights, proven by the sender's checksums.

    A replica has one; a replica on several devices has one on each.
    """

    def __init__(self, groups: list[Any], buckets: list[Bucket], wire: torch.device, replica: int) -> None:
        self.staged: dict[str, Tensor] = {}
        self.version: PolicyVersion | None = None
        self._groups = groups
        self._buckets = buckets
        self._wire = wire
        self._replica = replica
        self._sums: Tensor | None = None

    @classmethod
    def join(cls, specs: list[Spec], store: Any, device: torch.device, replica: int, config: Config, shard: int = 0) -> Inbox:
        """Meet every trainer rank. Blocks until all devices of the sync are there."""
        wire = wire_device(config, device)
        position = 1 + replica * config.rollout.tensor_model_parallel_size + shard
        size, timeout_s = 1 + config.rollout_devices, config.sync.timeout_s
        groups = [_group(store, wire, sender, position, size, timeout_s) for sender in range(config.trainer_ranks)]
        return cls(groups, plan(specs, config.sync.bucket_mb << 20), wire, replica)

    def receive(self, version: PolicyVersion) -> int:
        """Stage `version` and prove it; returns its bytes. Blocks: a thread's work."""
        self.version = None
        received = 0
        for k, bucket in enumerate(self._buckets):
            buffer = self._staging(bucket)
            _broadcast(self._groups[k % len(self._groups)], buffer)
            received += bucket.num_bytes
        total: Tensor | None = None
        for group in self._groups:
            sums = torch.zeros(sum(len(b.specs) for b in self._buckets), 2, dtype=torch.int64, device=self._wire)
            _broadcast(group, sums)
            total = sums if total is None else total + sums
        self._sums = total
        self.prove(self.staged, version, "received")
        self.version = version
        return received

    def prove(self, tensors: Mapping[str, Tensor], version: PolicyVersion, what: str) -> None:
        """Raise SyncError for the first tensor whose checksum is not the sender's."""
        if self._sums is None:
            raise SyncError(f"replica {self._replica} has no checksums of version {version}")
        names = [spec.name for bucket in self._buckets for spec in bucket.specs]
        own = torch.stack([checksum(tensors[name]) for name in names]).to(self._wire)
        wrong = (own != self._sums).any(dim=1).nonzero().flatten().tolist()
        if wrong:
            self.version = None
            raise SyncError(
                f"replica {self._replica}: {what} weights of version {version} are not the trainer's: {names[wrong[0]]}"
                f"{f' and {len(wrong) - 1} more tensors' if len(wrong) > 1 else ''} differ in checksum; it must not serve them"
            )

    def _staging(self, bucket: Bucket) -> Tensor:
        """The bucket's own buffer, made once: views into it are what `swap` reads."""
        first = bucket.specs[0].name
        if first not in self.staged:
            self.staged |= bucket.views(torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=self._wire))
        whole = self.staged[first]
        return torch.empty(0, dtype=torch.uint8, device=self._wire).set_(whole.untyped_storage())


class Receiver:
    """One replica's end, where the engine is in this process."""

    def __init__(self, holder: WeightHolder, inbox: Inbox, replica: int) -> None:
        self.inbox = inbox
        self._holder = holder
        self._replica = replica

    @classmethod
    async def join(cls, holder: WeightHolder, store: Any, replica: int, config: Config) -> Receiver:
        """Meet every trainer rank. Raises SyncError, with the first tensor that differs, if the models differ."""
        told = await asyncio.to_thread(told_specs, store)
        _compare(told, specs_of(holder.weights()), replica)
        device = next(iter(holder.weights().values())).device
        return cls(holder, await asyncio.to_thread(Inbox.join, told, store, device, replica, config), replica)

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Receive `version` beside the live weights, in a thread: the engine goes on decoding."""
        start = time.perf_counter()
        received = await asyncio.to_thread(self.inbox.receive, version)
        return TransferReport(received, time.perf_counter() - start)

    async def activate(self, version: PolicyVersion) -> float:
        """Serve the staged version from the next token on. Returns the seconds in which nothing was decoded."""
        if self.inbox.version != version:
            raise SyncError(f"replica {self._replica} is told to serve version {version}, but holds {self.inbox.version}")
        start = time.perf_counter()
        paused = await self._holder.swap(version, self.inbox.staged)
        # No await between the swap and the proof: nothing is decoded on weights that are not proven.
        after = time.perf_counter()
        self.inbox.prove(self._holder.weights(), version, "live")
        return min(paused + time.perf_counter() - after, time.perf_counter() - start)


def told_specs(store: Any) -> list[Spec]:
    """The tensors that trainer rank 0 will send, in order. Blocks until it has said so."""
    return msgspec.json.decode(store.get(_PLAN), type=list[Spec])


def wire_device(config: Config, device: torch.device) -> torch.device:
    """Where buckets travel: NCCL refuses two ranks on one GPU, so colocated sides meet in host memory."""
    return torch.device("cpu") if config.schedule.colocated else device


def _group(store: Any, device: torch.device, sender: int, rank: int, size: int, timeout_s: float) -> Any:
    """A process group apart from the default one: rank 0 is trainer rank `sender`, the others are the replicas' devices."""
    own = dist.PrefixStore(f"millrace/sync/{sender}", store)
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(own, rank, size, options)
    return dist.ProcessGroupGloo(own, rank, size, timeout)


def _broadcast(group: Any, tensor: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    try:
        group.broadcast([tensor], options).wait()
    except RuntimeError as error:
        raise SyncError(f"a weight transfer broke off: {error}") from error


def _compare(told: list[Spec], own: list[Spec], replica: int) -> None:
    for t, o in zip(told, own, strict=False):
        if t != o:
            raise SyncError(
                f"replica {replica} has {o.name} {o.dtype}{list(o.shape)} where the trainer has {t.name} {t.dtype}{list(t.shape)}"
            )
    if len(told) != len(own):
        raise SyncError(f"replica {replica} has {len(own)} tensors, the trainer {len(told)}")
