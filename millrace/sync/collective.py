"""Weights from the train engine's ranks to every replica, over persistent process groups (gloo on CPUs, NCCL on GPUs).

Each trainer rank of the first copy of the model has a group of its own with all replicas and sends the rows that it holds:
nothing is gathered, and other copies send nothing. Received weights are staged beside the live ones while rollouts go on
(`transfer`), then copied over them between two tokens (`activate`). The sender's checksums travel with the weights; a
replica proves them on what it received, and again on its live tensors before it serves the version. Of a policy with
low-rank adapters the base goes once, and then adapters alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import msgspec
import torch
from torch import Tensor

from millrace.errors import SyncError
from millrace.ports import TransferReport, WeightHolder, WeightSource
from millrace.sync.adapters import AdaptedInbox, join_inbox
from millrace.sync.agreement import Agreement
from millrace.sync.background import Beside
from millrace.sync.buckets import Bucket, Spec, part_of, plan, specs_of
from millrace.sync.groups import broadcast, finish, make_group, start_broadcast, wait_for_device
from millrace.sync.inbox import ADAPTERS, IN_FLIGHT, PLAN, Inbox, told_specs, wire_device
from millrace.types import PolicyVersion

Shards = Iterator[tuple[str, tuple[int, ...], torch.dtype, Tensor]]
"""Of every tensor, in order: its name, whole shape, dtype on the way, and the rows of this rank, in any dtype."""


class Sender:
    """One trainer rank's end, of those that hold the first copy of the model."""

    def __init__(
        self,
        source: WeightSource,
        group: Any,
        buckets: list[Bucket],
        wire: torch.device,
        adapters: list[Bucket] | None = None,
    ) -> None:
        self._source = source
        self._group = group
        self._wire = wire
        self._buckets = buckets
        self._adapters = adapters
        self._base_sent = False
        self._sending = Beside("sender")
        self._stream = torch.cuda.Stream(wire) if wire.type == "cuda" else None
        """Of what is sent beside the engine's steps."""

    @classmethod
    async def join(cls, source: WeightSource, store: Any, rank: int, agreed: Agreement) -> Sender:
        """Meet the replicas."""

        def planned(specs: list[Spec]) -> list[Bucket]:
            return plan(part_of(specs, rank, agreed.senders), agreed.bucket_bytes)

        buckets = planned(tell_specs(source.shards(), store, rank))
        adapters = (
            planned(tell_specs(source.adapters(), store, rank, ADAPTERS))
            if agreed.adapter_scale is not None
            else None
        )
        wire = wire_device(agreed, source.device)
        size, timeout_s = 1 + agreed.receivers, agreed.timeout_s
        group = await asyncio.to_thread(make_group, store, str(rank), wire, 0, size, timeout_s)
        return cls(source, group, buckets, wire, adapters)

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Send this rank's rows of the current weights as `version`: with adapters, these alone from the second time on."""
        await self.sent()
        start, sent = time.perf_counter(), 0
        for buckets, shards in self._due():
            largest = max(b.num_bytes for b in buckets)
            sent += self._send(
                buckets, self._packed(buckets, shards, self._buffers([largest] * IN_FLIGHT))
            )
        return TransferReport(sent, time.perf_counter() - start)

    async def keep(self, version: PolicyVersion) -> None:
        """Keep this rank's rows of the current weights as `version`, in the serving dtype, and begin to send them in a thread: the engine
        may step on. Takes the place of `transfer`. A failure is raised by `sent`; replicas miss what did not come.
        """
        await self.sent()
        kept = [
            (
                buckets,
                list(self._packed(buckets, shards, self._buffers([b.num_bytes for b in buckets]))),
            )
            for buckets, shards in self._due()
        ]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._wire))
        self._sending.start(self._send_kept, kept)

    async def sent(self) -> None:
        """Until what was kept is sent. Raises what its sending failed with, once."""
        await self._sending.done()

    def _due(self) -> list[tuple[list[Bucket], Shards]]:
        """What the next version takes."""
        due = (
            [(self._buckets, self._source.shards())]
            if self._adapters is None or not self._base_sent
            else []
        )
        self._base_sent = True
        return due + (
            [(self._adapters, self._source.adapters())] if self._adapters is not None else []
        )

    def _buffers(self, sizes: list[int]) -> list[Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=self._wire) for size in sizes]

    def _packed(
        self, buckets: list[Bucket], shards: Shards, buffers: list[Tensor]
    ) -> Iterator[Tensor]:
        """Each bucket, in the buffers in turn."""
        for k, bucket in enumerate(buckets):
            buffer = buffers[k % len(buffers)][: bucket.num_bytes]
            self._pack(bucket, buffer, shards)
            yield buffer

    def _send(self, buckets: list[Bucket], packed: Iterator[Tensor]) -> int:
        """Returns the bytes of `buckets`. The next one is packed while those before it are on their way, when its buffer has been sent."""
        sums, under_way = [], deque[Any]()
        for bucket in buckets:
            if len(under_way) == IN_FLIGHT:
                finish(under_way.popleft())
            buffer = next(packed)
            sums.append(bucket.sums(buffer))
            under_way.append(start_broadcast(self._group, buffer))
        while under_way:
            finish(under_way.popleft())
        broadcast(self._group, torch.cat(sums))
        wait_for_device(self._wire)
        return sum(b.num_bytes for b in buckets)

    def _send_kept(self, kept: list[tuple[list[Bucket], list[Tensor]]]) -> None:
        """In a thread. On a GPU on a stream of its own: the engine's holds its next step. Empties `kept`."""
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                for buckets, buffers in kept:
                    self._send(buckets, iter(buffers))
        finally:
            kept.clear()  # now, not when the event loop has its next turn: that is after the step

    def _pack(self, bucket: Bucket, buffer: Tensor, shards: Shards) -> None:
        """The bucket's tensors, cast to the serving dtype on the way."""
        views, rows = bucket.views(buffer.zero_()), []
        for spec in bucket.specs:
            name, _, _, own = next(shards)
            if name != spec.name:
                raise SyncError(f"the train engine sends {name} where the plan has {spec.name}")
            rows.append(own.to(self._wire))
        torch._foreach_copy_(list(views.values()), rows)

    async def link(self) -> TransferReport:
        """Send as many bytes as a transfer does (with adapters, not the first), and nothing else: no packing, no sums. What the link
        can carry.
        """
        buckets = self._buckets if self._adapters is None else self._adapters
        buffers = [torch.zeros(b.num_bytes, dtype=torch.uint8, device=self._wire) for b in buckets]
        wait_for_device(self._wire)
        start = time.perf_counter()
        for work in [start_broadcast(self._group, buffer) for buffer in buffers]:
            finish(work)
        wait_for_device(self._wire)
        return TransferReport(sum(b.num_bytes for b in buckets), time.perf_counter() - start)

    async def transport(self) -> str:
        """The process groups' backend."""
        return "nccl" if self._wire.type == "cuda" else "gloo"


class Silent:
    """A trainer rank's end, of those that hold a further copy: it answers as a Sender does, which has the same rows and sends them."""

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """No bytes in no time."""
        return TransferReport(0, 0.0)

    async def keep(self, version: PolicyVersion) -> None:
        """Nothing is kept."""

    async def sent(self) -> None:
        """Nothing was."""

    async def link(self) -> TransferReport:
        """The same."""
        return TransferReport(0, 0.0)

    async def transport(self) -> str:
        """By which nothing is sent."""
        return "none"


async def join_sender(
    source: WeightSource, store: Any, rank: int, agreed: Agreement
) -> Sender | Silent:
    """The end of trainer rank `rank`. One that sends meets the replicas."""
    return await Sender.join(source, store, rank, agreed) if rank < agreed.senders else Silent()


class Receiver:
    """One replica's end, where the engine is in this process."""

    def __init__(self, holder: WeightHolder, inbox: Inbox | AdaptedInbox, replica: int) -> None:
        self.inbox = inbox
        self._holder = holder
        self._replica = replica

    @classmethod
    async def join(
        cls, holder: WeightHolder, store: Any, replica: int, agreed: Agreement
    ) -> Receiver:
        """Meet every trainer rank that sends. Raises SyncError, with the first tensor that differs, if the models differ."""
        told = await asyncio.to_thread(told_specs, store)
        _compare_specs(told, specs_of(holder.weights()), replica)
        device = next(iter(holder.weights().values())).device
        return cls(
            holder,
            await asyncio.to_thread(join_inbox, told, store, device, replica, agreed),
            replica,
        )

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
            raise SyncError(
                f"replica {self._replica} is told to serve version {version}, but holds {self.inbox.version}"
            )
        start = time.perf_counter()
        paused = await self._holder.swap(version, self.inbox.staged)
        # No await between the swap and the proof: nothing is decoded on weights that are not proven.
        after = time.perf_counter()
        self.inbox.prove(self._holder.weights(), version)
        return min(paused + time.perf_counter() - after, time.perf_counter() - start)


def tell_specs(shards: Shards, store: Any, rank: int, key: str = PLAN) -> list[Spec]:
    """The tensors that the trainer sends, in order; rank 0 tells them to the replicas."""
    specs = [
        Spec(name, tuple(shape), str(dtype).removeprefix("torch."))
        for name, shape, dtype, _ in shards
    ]
    if rank == 0:
        store.set(key, msgspec.json.encode(specs))
    return specs


def _compare_specs(told: list[Spec], own: list[Spec], replica: int) -> None:
    for t, o in zip(told, own, strict=False):
        if t != o:
            raise SyncError(
                f"replica {replica} has {o.name} {o.dtype}{list(o.shape)} where the trainer has {t.name} {t.dtype}{list(t.shape)}"
            )
    if len(told) != len(own):
        raise SyncError(f"replica {replica} has {len(own)} tensors, the trainer {len(told)}")
