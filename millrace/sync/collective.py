"""Weights from the train engine's ranks to every replica, over persistent process groups (gloo on CPUs, NCCL on GPUs).

Each trainer rank has a group of its own with all replicas and sends every world-size-th bucket. Received weights are
staged beside the live ones while rollouts go on (`transfer`), then copied over them between two tokens (`activate`). The
sender's checksums travel with the weights; a replica proves them on what it staged, and again on its live tensors before
it serves the version.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
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
_IN_FLIGHT = 3  # buckets


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
        weights = self._source.full_weights()
        sums, under_way, sent = [], deque[tuple[Any, Tensor]](), 0
        for k, bucket in enumerate(self._buckets):
            mine = k % self._world_size == self._rank
            buffer = torch.zeros(bucket.num_bytes if mine else 0, dtype=torch.uint8, device=self._wire)
            views = bucket.views(buffer) if mine else {}
            for spec in bucket.specs:
                name, tensor = next(weights)
                if name != spec.name:
                    raise SyncError(f"the train engine sends {name} where the plan has {spec.name}")
                if mine:
                    views[name].copy_(tensor)
            if mine:
                sums.append(bucket.checksums(buffer))
                # The next bucket is packed while this one is on its way.
                under_way.append((_start_broadcast(self._group, buffer), buffer))
                sent += bucket.num_bytes
                if len(under_way) > _IN_FLIGHT:
                    _finish(under_way.popleft()[0])
            else:
                sums.append(torch.zeros(len(bucket.specs), 2, dtype=torch.int64, device=self._wire))
        while under_way:
            _finish(under_way.popleft()[0])
        if sums:
            _broadcast(self._group, torch.cat(sums))
        return TransferReport(sent, time.perf_counter() - start)

    async def link(self) -> TransferReport:
        """Send as many bytes as a transfer does, and nothing else: no gather, no packing, no sums. What the link can carry."""
        mine = self._buckets[self._rank :: self._world_size]
        buffers = [torch.zeros(b.num_bytes, dtype=torch.uint8, device=self._wire) for b in mine]
        _wait_for_device(self._wire)
        start = time.perf_counter()
        for work in [_start_broadcast(self._group, buffer) for buffer in buffers]:
            _finish(work)
        _wait_for_device(self._wire)
        return TransferReport(sum(b.num_bytes for b in mine), time.perf_counter() - start)

    async def transport(self) -> str:
        """The process groups' backend."""
        return "nccl" if self._wire.type == "cuda" else "gloo"


class Inbox:
    """What one receiving device gets: buckets staged beside the live weights, proven by the sender's checksums.

    A replica has one; a replica on several devices has one on each.
    """

    def __init__(self, groups: list[Any], buckets: list[Bucket], wire: torch.device, replica: int) -> None:
        self.buffers = [torch.zeros(b.num_bytes, dtype=torch.uint8, device=wire) for b in buckets]
        self.staged = {
            name: view for b, buffer in zip(buckets, self.buffers, strict=True) for name, view in b.views(buffer).items()
        }
        """Views into the buffers: what `swap` reads."""
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
        # All at once: the sums of one bucket are taken while the next ones arrive.
        works = [_start_broadcast(self._groups[k % len(self._groups)], buffer) for k, buffer in enumerate(self.buffers)]
        own = []
        for work, bucket, buffer in zip(works, self._buckets, self.buffers, strict=True):
            _finish(work)
            own.append(bucket.checksums(buffer))
        if own:
            told = []
            for group in self._groups:
                told.append(torch.zeros_like(torch.cat(own)))
                _broadcast(group, told[-1])
            self._sums = torch.stack(told).sum(0)
            self._compare(torch.cat(own), version, "received")
        self.version = version
        return sum(bucket.num_bytes for bucket in self._buckets)

    def link(self) -> int:
        """The other end of `Sender.link`. What was staged is gone."""
        self.version = None
        for work in [_start_broadcast(self._groups[k % len(self._groups)], b) for k, b in enumerate(self.buffers)]:
            _finish(work)
        _wait_for_device(self._wire)
        return sum(b.num_bytes for b in self._buckets)

    def prove(self, tensors: Mapping[str, Tensor], version: PolicyVersion, what: str) -> None:
        """Raise SyncError for the first tensor whose checksum is not the sender's."""
        own = torch.stack([checksum(tensors[spec.name]) for bucket in self._buckets for spec in bucket.specs])
        self._compare(own.to(self._wire), version, what)

    def bit_sums(self) -> dict[str, int]:
        """`proof.bit_sum` of every staged tensor, by name."""
        sums: list[int] = torch.cat([b.bit_sums(buffer) for b, buffer in zip(self._buckets, self.buffers, strict=True)]).tolist()
        return dict(zip(self.staged, sums, strict=True))

    def _compare(self, own: Tensor, version: PolicyVersion, what: str) -> None:
        if self._sums is None:
            raise SyncError(f"replica {self._replica} has no checksums of version {version}")
        wrong = (own != self._sums).any(dim=1).nonzero().flatten().tolist()
        if wrong:
            self.version = None
            names = list(self.staged)
            raise SyncError(
                f"replica {self._replica}: {what} weights of version {version} are not the trainer's: {names[wrong[0]]}"
                f"{f' and {len(wrong) - 1} more tensors' if len(wrong) > 1 else ''} differ in checksum; it must not serve them"
            )


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

    async def link(self) -> TransferReport:
        """Receive as many bytes as a transfer has, and nothing else."""
        start = time.perf_counter()
        return TransferReport(await asyncio.to_thread(self.inbox.link), time.perf_counter() - start)

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


def _wait_for_device(wire: torch.device) -> None:
    if wire.type == "cuda":
        torch.cuda.current_stream(wire).synchronize()


def _start_broadcast(group: Any, tensor: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    try:
        return group.broadcast([tensor], options)
    except RuntimeError as error:
        raise _broken_off(error) from error


def _finish(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _broken_off(error) from error


def _broken_off(error: RuntimeError) -> SyncError:
    return SyncError(f"a weight transfer broke off: {error}")


def _broadcast(group: Any, tensor: Tensor) -> None:
    _finish(_start_broadcast(group, tensor))


def _compare(told: list[Spec], own: list[Spec], replica: int) -> None:
    for t, o in zip(told, own, strict=False):
        if t != o:
            raise SyncError(
                f"replica {replica} has {o.name} {o.dtype}{list(o.shape)} where the trainer has {t.name} {t.dtype}{list(t.shape)}"
            )
    if len(told) != len(own):
        raise SyncError(f"replica {replica} has {len(own)} tensors, the trainer {len(told)}")
