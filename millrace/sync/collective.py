"""Weight transfer from the train engine's ranks to every replica, over persistent process groups.

The groups use gloo on CPUs and NCCL on GPUs. Each trainer rank that has rows to send has its own
group with all replicas. It sends its own rows: nothing is gathered. It tells them once, at the
start. Of several copies of the model, one sends. `transfer` stages the received weights in separate
tensors while rollouts continue. `activate` then copies them over the live weights between two
tokens.

The sender's checksums travel with the weights. A replica verifies them on the received weights, and
again on its live tensors before it serves the version. For a policy with low-rank adapters, the
base is sent once, and the adapters are sent with every version.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from millrace.errors import SyncError
from millrace.ports import TransferReport, WeightHolder, WeightSource
from millrace.sync.adapters import AdaptedInbox, join_inbox
from millrace.sync.agreement import Agreement
from millrace.sync.background import Background
from millrace.sync.buckets import Bucket, plan, specs_of
from millrace.sync.groups import (
    LAST,
    broadcast,
    finish,
    make_group,
    member,
    start_broadcast,
    wait_for_device,
)
from millrace.sync.inbox import IN_FLIGHT, Inbox, wire_device
from millrace.sync.table import (
    ADAPTERS,
    Shards,
    compare_specs,
    part_of,
    read_specs,
    sends,
    tell,
)
from millrace.types import PolicyVersion


class Sender:
    """The sending end of one trainer rank that has rows to send."""

    def __init__(
        self,
        source: WeightSource,
        group: Any,
        buckets: list[Bucket],
        wire: torch.device,
        adapters: list[Bucket] | None = None,
        rank: int = 0,
    ) -> None:
        self._rank = rank
        self._version: PolicyVersion = 0
        """The version that is sent."""
        self._source = source
        self._group = group
        self._wire = wire
        self._buckets = buckets
        self._adapters = adapters
        self._base_sent = False
        self._sending = Background("sender")
        self._stream = torch.cuda.Stream(wire) if wire.type == "cuda" else None
        """The stream of transfers that run during the engine's steps."""

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Send this rank's rows of the current weights as `version`.

        With adapters, the base is sent only with the first version.
        """
        await self.sent()
        self._version = version
        start, sent = time.perf_counter(), 0
        for buckets, shards in self._due():
            largest = max(b.num_bytes for b in buckets)
            sent += self._send(
                buckets, self._packed(buckets, shards, self._buffers([largest] * IN_FLIGHT))
            )
        return TransferReport(sent, time.perf_counter() - start)

    async def keep(self, version: PolicyVersion) -> None:
        """Copy this rank's rows as `version`, in the serving dtype, and send the copy in a thread.

        Call this instead of `transfer`, if the engine must continue its steps. If the transfer
        fails, `sent` raises the error, and replicas lack the version.
        """
        await self.sent()
        self._version = version
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
        """Wait until the copy is sent. Raises the error of a failed transfer, once."""
        await self._sending.wait()

    def _due(self) -> list[tuple[list[Bucket], Shards]]:
        """Return the buckets and shards of the next version."""
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
        """Yield a buffer for each bucket, packed. The buffers are used in turn."""
        for k, bucket in enumerate(buckets):
            buffer = buffers[k % len(buffers)][: bucket.num_bytes]
            self._pack(bucket, buffer, shards)
            yield buffer

    def _send(self, buckets: list[Bucket], packed: Iterator[Tensor]) -> int:
        """Send the buckets, and return their bytes.

        The next bucket is packed while earlier ones are in transit, once its buffer is free.
        """
        sums, in_flight = [], deque[Any]()
        landed = 0

        def land() -> None:
            nonlocal landed
            with member("rollout-*", self._rank, self._version, landed):
                finish(in_flight.popleft())
            landed += 1

        for bucket in buckets:
            if len(in_flight) == IN_FLIGHT:
                land()
            buffer = next(packed)
            sums.append(bucket.sums(buffer))
            in_flight.append(start_broadcast(self._group, buffer))
        while in_flight:
            land()
        with member("rollout-*", self._rank, self._version, LAST):
            broadcast(self._group, torch.cat(sums))
        wait_for_device(self._wire)
        return sum(b.num_bytes for b in buckets)

    def _send_kept(self, kept: list[tuple[list[Bucket], list[Tensor]]]) -> None:
        """Send the copy, in a thread, and empty `kept`.

        On a GPU, this uses its own stream, because the engine's stream runs the next step.
        """
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                for buckets, buffers in kept:
                    self._send(buckets, iter(buffers))
        finally:
            kept.clear()  # free the memory now: the event loop does not run before the step ends

    def _pack(self, bucket: Bucket, buffer: Tensor, shards: Shards) -> None:
        """Copy the bucket's tensors into its buffer, cast to the serving dtype."""
        views, rows = bucket.views(buffer.zero_()), []
        for spec in bucket.specs:
            name, _, _, _, own = next(shards)
            if name != spec.name:
                raise SyncError(f"the train engine sends {name}, but the plan expects {spec.name}")
            if own.shape != spec.shape:
                raise SyncError(
                    f"the train engine sends {list(own.shape)} of {name}, "
                    f"but it told {list(spec.shape)}"
                )
            rows.append(own.to(self._wire))
        torch._foreach_copy_(list(views.values()), rows)

    async def link(self) -> TransferReport:
        """Send as many bytes as a transfer, without packing or sums: a measurement of the link.

        With adapters, the bytes are those of a transfer after the first.
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
        """Return the process groups' backend."""
        return "nccl" if self._wire.type == "cuda" else "gloo"


class Silent:
    """The end of a trainer rank that has no rows to send, such as one of another copy of the model.

    It has the methods of a Sender and sends nothing.
    """

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Report no bytes and no time."""
        return TransferReport(0, 0.0)

    async def keep(self, version: PolicyVersion) -> None:
        """Copy nothing."""

    async def sent(self) -> None:
        """Return at once."""

    async def link(self) -> TransferReport:
        """Report no bytes and no time."""
        return TransferReport(0, 0.0)

    async def transport(self) -> str:
        """Return "none"."""
        return "none"


async def join_sender(
    source: WeightSource, store: Any, rank: int, agreed: Agreement
) -> Sender | Silent:
    """Tell the rows of trainer rank `rank`, and return its end.

    A rank with rows to send joins the replicas, and waits until all have joined.
    """
    specs, rows = tell(source.shards(), store, rank)
    buckets, adapters, more = plan(part_of(specs, rows), agreed.bucket_bytes), None, None
    if agreed.adapter_scale is not None:
        specs, more = tell(source.adapters(), store, rank, ADAPTERS)
        adapters = plan(part_of(specs, more), agreed.bucket_bytes)
    if not sends(rows, more):
        return Silent()
    wire = wire_device(agreed, source.device)
    size, timeout_s = 1 + agreed.receivers, agreed.timeout_s
    group = await asyncio.to_thread(make_group, store, str(rank), wire, 0, size, timeout_s)
    return Sender(source, group, buckets, wire, adapters, rank)


class Receiver:
    """The receiving end of one replica, with the engine in this process."""

    def __init__(self, holder: WeightHolder, inbox: Inbox | AdaptedInbox, replica: int) -> None:
        self.inbox = inbox
        self._holder = holder
        self._replica = replica

    @classmethod
    async def join(
        cls, holder: WeightHolder, store: Any, replica: int, agreed: Agreement
    ) -> Receiver:
        """Join every trainer rank that sends, and return this replica's end.

        Raises SyncError, with the first tensor that differs, if the models differ.
        """
        specs = await asyncio.to_thread(read_specs, store)
        compare_specs(specs, specs_of(holder.weights()), "the trainer", f"replica {replica}")
        device = next(iter(holder.weights().values())).device
        return cls(
            holder,
            await asyncio.to_thread(join_inbox, specs, store, device, replica, agreed),
            replica,
        )

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Receive and stage `version` in a thread. The engine continues to decode."""
        start = time.perf_counter()
        received = await asyncio.to_thread(self.inbox.receive, version)
        return TransferReport(received, time.perf_counter() - start)

    async def link(self) -> TransferReport:
        """Receive as many bytes as a transfer has, and do nothing else."""
        start = time.perf_counter()
        return TransferReport(await asyncio.to_thread(self.inbox.link), time.perf_counter() - start)

    async def activate(self, version: PolicyVersion) -> float:
        """Serve the staged version from the next token on. Return the seconds without decoding."""
        if self.inbox.version != version:
            raise SyncError(
                f"replica {self._replica} cannot serve version {version}: "
                f"its staged version is {self.inbox.version}"
            )
        start = time.perf_counter()
        paused = await self._holder.swap(version, self.inbox.staged)
        # There is no await between the swap and the proof, so no token is drawn from unverified
        # weights.
        after = time.perf_counter()
        self.inbox.prove(self._holder.weights(), version)
        return min(paused + time.perf_counter() - after, time.perf_counter() - start)
