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

from millrace.errors import BrokenTransfer, CopyGone, SyncError
from millrace.ports import TransferReport, WeightHolder, WeightSource
from millrace.sync.adapters import LoraStaging, join_inbox
from millrace.sync.background import Background, abandonable
from millrace.sync.buckets import Bucket, checksums, plan, specs_of
from millrace.sync.groups import (
    LAST,
    all_agree,
    broadcast,
    finish,
    member,
    start_broadcast,
    wait_for_device,
)
from millrace.sync.membership import Membership, rank_name
from millrace.sync.options import SyncOptions
from millrace.sync.proof import changed
from millrace.sync.staging import IN_FLIGHT, StagingBuffer, wire_device
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

Packed = list[tuple[list[Bucket], list[Tensor]]]
"""Buckets, and a packed buffer for each."""


class Sender:
    """The sending end of one trainer rank that has rows to send."""

    def __init__(
        self,
        source: WeightSource,
        membership: Membership,
        rank: int,
        buckets: list[Bucket],
        wire: torch.device,
        adapters: list[Bucket] | None = None,
    ) -> None:
        self._version: PolicyVersion = 0
        """The version that is sent."""
        self._source = source
        self._membership = membership
        self._rank = rank
        self._wire = wire
        self._buckets = buckets
        self._adapters = adapters
        self._base_due = True
        self._kept: tuple[PolicyVersion, Packed] | None = None
        """The copy of a version that some replicas may still lack."""
        self._sending = Background("sender")
        self._stream = torch.cuda.Stream(wire) if wire.type == "cuda" else None
        """The stream of transfers that run during the engine's steps."""

    async def regroup(self, generation: int, members: list[int]) -> None:
        """Leave the old group, and join the one of `generation` with the replicas `members`.

        A transfer under way breaks off. The copy of a kept version stays.
        """
        self._sending.forget()
        self._base_due = await abandonable(
            self._membership.join, generation, members, lacks_base=False
        )

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Send this rank's rows of the current weights as `version`, in a thread.

        With adapters, the base is sent only with the first version of a replica.
        """
        await self.sent()
        self._kept, self._version = None, version
        return await self._sending.run(self._transfer, version)

    def _transfer(self, version: PolicyVersion) -> TransferReport:
        start, sent = time.perf_counter(), 0
        if self._wire.type == "cuda":
            torch.cuda.set_device(self._wire)
        for buckets, shards in self._due():
            largest = max(b.num_bytes for b in buckets)
            buffers = self._buffers([largest] * IN_FLIGHT)
            self._send(buckets, self._packed(buckets, shards, buffers))
            sent += sum(b.num_bytes for b in buckets)
        return TransferReport(sent, time.perf_counter() - start)

    async def keep(self, version: PolicyVersion) -> None:
        """Copy this rank's rows as `version`, in the serving dtype, and send the copy in a thread.

        Call this instead of `transfer`, if the engine must continue its steps. If the transfer
        fails, `sent` raises the error. The copy stays until all replicas have the version.
        """
        await self.sent()
        self._version = version
        self._kept = version, [self._copied(*due) for due in self._due()]
        self._start()

    async def resend(self, version: PolicyVersion) -> None:
        """Begin to send the copy of a kept version again, to the replicas of a new group.

        Raises SyncError if there is no copy any more.
        """
        if self._kept is None or self._kept[0] != version:
            raise CopyGone(
                f"version {version} cannot be sent again: all replicas had it, and its copy is gone"
            )
        if self._adapters is not None:
            base = [self._copied(*due) for due in self._due()[:-1]]
            self._kept = version, [*base, self._kept[1][-1]]
        self._start()

    async def sent(self) -> None:
        """Wait until the copy is sent. Raises the error of a failed transfer, once."""
        await self._sending.wait()

    def _copied(self, buckets: list[Bucket], shards: Shards) -> tuple[list[Bucket], list[Tensor]]:
        buffers = self._buffers([b.num_bytes for b in buckets])
        return buckets, list(self._packed(buckets, shards, buffers))

    def _start(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._wire))
        self._sending.start(self._send_kept)

    def _due(self) -> list[tuple[list[Bucket], Shards]]:
        """Return the buckets and shards of the next version."""
        due = (
            [(self._buckets, self._source.shards())]
            if self._adapters is None or self._base_due
            else []
        )
        self._base_due = False
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

    def _send(self, buckets: list[Bucket], packed: Iterator[Tensor]) -> bool:
        """Send the buckets. Return whether all replicas have the version whole.

        The next bucket is packed while earlier ones are in transit, once its buffer is free.
        """
        with self._membership.using:
            if self._rank not in self._membership.groups:
                raise BrokenTransfer(f"trainer rank {self._rank} is in no group of the weight sync")
            group = self._membership.groups[self._rank]
            sums, in_flight = [], deque[tuple[int, Any]]()

            def complete_oldest() -> None:
                k, work = in_flight.popleft()
                with member("rollout-*", self._rank, self._version, k):
                    finish(work)

            for k, bucket in enumerate(buckets):
                if len(in_flight) == IN_FLIGHT:
                    complete_oldest()
                buffer = next(packed)
                sums.append(bucket.sums(buffer))
                in_flight.append((k, start_broadcast(group, buffer)))
            while in_flight:
                complete_oldest()
            with member("rollout-*", self._rank, self._version, LAST):
                broadcast(group, torch.cat(sums))
            wait_for_device(self._wire)
            return all_agree(group, True, self._wire)

    def _send_kept(self) -> None:
        """Send the copy, in a thread, and free it once all replicas have the version.

        On a GPU, this uses its own stream, because the engine's stream runs the next step.
        """
        assert self._kept is not None
        _, kept = self._kept
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            whole = [self._send(buckets, iter(buffers)) for buckets, buffers in kept]
        if all(whole):
            self._kept = None
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
        group = self._membership.groups[self._rank]
        for work in [start_broadcast(group, buffer) for buffer in buffers]:
            finish(work)
        wait_for_device(self._wire)
        return TransferReport(sum(b.num_bytes for b in buckets), time.perf_counter() - start)

    async def transport(self) -> str:
        """Return the process groups' backend."""
        return "nccl" if self._wire.type == "cuda" else "gloo"


class NullSender:
    """The end of a trainer rank that has no rows to send, such as one of another copy of the model.

    It has the methods of a Sender and sends nothing.
    """

    async def regroup(self, generation: int, members: list[int]) -> None:
        """Join no group."""

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Report no bytes and no time."""
        return TransferReport(0, 0.0)

    async def keep(self, version: PolicyVersion) -> None:
        """Copy nothing."""

    async def resend(self, version: PolicyVersion) -> None:
        """Send nothing."""

    async def sent(self) -> None:
        """Return at once."""

    async def link(self) -> TransferReport:
        """Report no bytes and no time."""
        return TransferReport(0, 0.0)

    async def transport(self) -> str:
        """Return "none"."""
        return "none"


async def join_sender(
    source: WeightSource, store: Any, rank: int, agreed: SyncOptions
) -> Sender | NullSender:
    """Tell the rows of trainer rank `rank`, and return its end. `regroup` joins the replicas."""
    specs, rows = tell(source.shards(), store, rank)
    buckets, adapters, more = plan(part_of(specs, rows), agreed.bucket_bytes), None, None
    if agreed.adapter_scale is not None:
        specs, more = tell(source.adapters(), store, rank, ADAPTERS)
        adapters = plan(part_of(specs, more), agreed.bucket_bytes)
    if not sends(rows, more):
        return NullSender()
    wire = wire_device(agreed, source.device)
    membership = Membership(store, agreed, wire, [rank], rank_name(rank))
    return Sender(source, membership, rank, buckets, wire, adapters)


class Receiver:
    """The receiving end of one replica, with the engine in this process."""

    def __init__(
        self, holder: WeightHolder, inbox: StagingBuffer | LoraStaging, replica: int
    ) -> None:
        self.inbox = inbox
        self._live: tuple[PolicyVersion, Tensor] | None = None
        """The live version, and the checksums of its tensors in the order of the inbox."""
        self._holder = holder
        self._replica = replica

    @classmethod
    async def join(
        cls, holder: WeightHolder, store: Any, replica: int, agreed: SyncOptions
    ) -> Receiver:
        """Return this replica's end. Its `regroup` joins the trainer ranks that send.

        Raises SyncError, with the first tensor that differs, if the models differ.
        """
        return cls(holder, await _inbox_of(holder, store, replica, agreed), replica)

    async def meet(self, store: Any, agreed: SyncOptions, address: tuple[str, int]) -> None:
        """Leave the ranks of a lost trainer, and prepare to join those in `store`."""
        inbox = self.__dict__.pop("inbox", None)
        if inbox is not None:
            await abandonable(inbox.leave)
        del inbox  # its memory is free before the next one takes as much
        self.inbox = await _inbox_of(self._holder, store, self._replica, agreed)

    async def regroup(self, generation: int, members: list[int]) -> PolicyVersion | None:
        """Leave the old groups, and join those of `generation` with the replicas `members`.

        A transfer under way breaks off. Return the staged version, which stays.
        """
        return await abandonable(self.inbox.regroup, generation, members)

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Receive and stage `version` in a thread. The engine continues to decode.

        Raises SyncError if a live tensor has changed since its version became live.
        """
        start = time.perf_counter()
        received = await asyncio.to_thread(self._receive, version)
        return TransferReport(received, time.perf_counter() - start)

    def _receive(self, version: PolicyVersion) -> int:
        received = self.inbox.receive(version)
        if self._live is not None:
            # Here, and not in `activate`, because decoding goes on meanwhile.
            live, sums = self._live
            own = checksums(self._holder.weights(), self.inbox.staged)
            wrong = (own != sums).any(dim=1).nonzero().flatten().tolist()
            if wrong:
                self.inbox.version = None
                raise changed(self._replica, live, [list(self.inbox.staged)[i] for i in wrong])
        return received

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
        start, self._live = time.perf_counter(), None
        paused = await self._holder.swap(version, self.inbox.staged)
        # There is no await between the swap and the proof, so no token is drawn from unverified
        # weights.
        after = time.perf_counter()
        self._live = version, self.inbox.prove(self._holder.weights(), version)
        return min(paused + time.perf_counter() - after, time.perf_counter() - start)


async def _inbox_of(
    holder: WeightHolder, store: Any, replica: int, agreed: SyncOptions
) -> StagingBuffer | LoraStaging:
    specs = await asyncio.to_thread(read_specs, store)
    compare_specs(specs, specs_of(holder.weights()), "the trainer", f"replica {replica}")
    device = next(iter(holder.weights().values())).device
    return await asyncio.to_thread(join_inbox, specs, store, device, replica, agreed)
