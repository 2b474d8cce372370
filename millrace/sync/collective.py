"""Weights from the train engine's ranks to every replica, over persistent process groups (gloo on CPUs, NCCL on GPUs).

Each trainer rank has a group of its own with all replicas and sends the rows that it holds: nothing is gathered. Received
weights are staged beside the live ones while rollouts go on (`transfer`), then copied over them between two tokens
(`activate`). The sender's checksums travel with the weights; a replica proves them on what it received, and again on its
live tensors before it serves the version. Of a policy with low-rank adapters the base goes once, and then adapters alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from millrace.config import Config
from millrace.errors import SyncError
from millrace.ports import TransferReport, WeightHolder
from millrace.sync.adapters import AdaptedInbox
from millrace.sync.buckets import Bucket, Spec, checksum, part_of, plan, rows_of, specs_of
from millrace.sync.groups import broadcast, finish, make_group, start_broadcast, wait_for_device
from millrace.types import PolicyVersion

_PLAN = "millrace/sync/plan"
_ADAPTERS = "millrace/sync/adapters"
_IN_FLIGHT = 3  # buckets of one sender


Shards = Iterator[tuple[str, tuple[int, ...], torch.dtype, Tensor]]
"""Of every tensor, in order: its name, whole shape, dtype on the way, and the rows of this rank, in any dtype."""


class WeightSource(Protocol):
    """The train engine as a sender sees it."""

    def shards(self) -> Shards:
        """Every tensor that is served, in model order and in the serving dtype; without what adapters add."""
        ...

    def adapters(self) -> Shards:
        """Where model.lora_rank is set: W.lora_A [rank, in] and W.lora_B [out, rank] of every adapted tensor W, in float32."""
        ...

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor whole, in the serving dtype, in model order. Collective over the trainer's ranks."""
        ...


class Sender:
    """One trainer rank's end."""

    def __init__(
        self, source: WeightSource, group: Any, buckets: list[Bucket], wire: torch.device, adapters: list[Bucket] | None = None
    ) -> None:
        self._source = source
        self._group = group
        self._wire = wire
        self._buckets = buckets
        self._adapters = adapters
        self._base_sent = False

    @classmethod
    async def join(cls, source: WeightSource, store: Any, rank: int, config: Config) -> Sender:
        """Meet the replicas."""

        def planned(specs: list[Spec]) -> list[Bucket]:
            return plan(part_of(specs, rank, config.trainer_ranks), config.sync.bucket_mb << 20)

        buckets = planned(tell_specs(source.shards(), store, rank))
        adapters = planned(tell_specs(source.adapters(), store, rank, _ADAPTERS)) if config.model.lora_rank else None
        wire = wire_device(config, next(source.shards())[3].device)
        size, timeout_s = 1 + config.rollout_devices, config.sync.timeout_s
        group = await asyncio.to_thread(make_group, store, str(rank), wire, 0, size, timeout_s)
        return cls(source, group, buckets, wire, adapters)

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Send this rank's rows of the current weights as `version`: with adapters, these alone from the second time on."""
        start, sent = time.perf_counter(), 0
        if self._adapters is None or not self._base_sent:
            sent += self._send(self._buckets, self._source.shards)
            self._base_sent = True
        if self._adapters is not None:
            sent += self._send(self._adapters, self._source.adapters)
        return TransferReport(sent, time.perf_counter() - start)

    def _send(self, buckets: list[Bucket], source: Callable[[], Shards]) -> int:
        """Returns the bytes of `buckets`."""
        shards = source()
        largest = max(b.num_bytes for b in buckets)
        ring = [torch.empty(largest, dtype=torch.uint8, device=self._wire) for _ in range(_IN_FLIGHT)]
        sums, under_way = [], deque[Any]()
        for k, bucket in enumerate(buckets):
            if len(under_way) == _IN_FLIGHT:
                finish(under_way.popleft())
            # Its last broadcast is done. The next bucket is packed while others are on their way.
            buffer = ring[k % _IN_FLIGHT][: bucket.num_bytes]
            self._pack(bucket, buffer, shards)
            sums.append(bucket.sums(buffer))
            under_way.append(start_broadcast(self._group, buffer))
        while under_way:
            finish(under_way.popleft())
        broadcast(self._group, torch.cat(sums))
        wait_for_device(self._wire)
        return sum(b.num_bytes for b in buckets)

    def _pack(self, bucket: Bucket, buffer: Tensor, shards: Shards) -> None:
        """The bucket's tensors, cast to the serving dtype on the way."""
        views, rows = bucket.views(buffer.zero_()), []
        for spec in bucket.specs:
            name, _, _, own = next(shards)
            if name != spec.name:
                raise SyncError(f"the train engine sends {name} where the plan has {spec.name}")
            rows.append(own)
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


class Inbox:
    """What one receiving device gets: every sender's rows, staged beside the live weights, proven by the senders' checksums.

    A replica has one; a replica on several devices has one on each.
    """

    def __init__(
        self,
        groups: list[Any],
        specs: list[Spec],
        bucket_bytes: int,
        wire: torch.device,
        replica: int,
        *,
        with_bit_sums: bool = False,
    ) -> None:
        self.version: PolicyVersion | None = None
        self.bit_sums: dict[str, int] = {}
        """`proof.bit_sum` of every staged tensor, by name, if `with_bit_sums`: then live weights are proven by these, not by `prove`."""
        self._with_bit_sums = with_bit_sums
        self._groups = groups
        self._specs = specs
        self._wire = wire
        self._replica = replica
        self._plans = [plan(part_of(specs, r, len(groups)), bucket_bytes) for r in range(len(groups))]
        whole = [torch.empty(s.shape, dtype=getattr(torch, s.dtype), device=wire) for s in specs] if len(groups) > 1 else []
        self._buffers = [self._landing(buckets, alone=not whole) for buckets in self._plans]
        # Made once: this process decodes beside the thread that receives, and whatever Python that does slows both down.
        self._rows = [self._moves(r, whole) for r in range(len(groups))] if whole else []
        only = zip(self._plans[0], self._buffers[0], strict=False)
        self.staged = (
            dict(zip((s.name for s in specs), whole, strict=True))
            if whole
            else {name: view for bucket, buffer in only for name, view in bucket.views(buffer).items()}
        )
        """Whole tensors: what `swap` reads."""
        self._sums: Tensor | None = None

    def _landing(self, buckets: list[Bucket], *, alone: bool) -> list[Tensor]:
        """Where a sender's buckets arrive: to stay, if they are whole tensors; else in turn, until their rows are where they belong."""
        if alone:
            return [torch.zeros(b.num_bytes, dtype=torch.uint8, device=self._wire) for b in buckets]
        largest = max(b.num_bytes for b in buckets)
        ring = [torch.zeros(largest, dtype=torch.uint8, device=self._wire) for _ in range(_IN_FLIGHT)]
        return [ring[k % _IN_FLIGHT][: b.num_bytes] for k, b in enumerate(buckets)]

    def _moves(self, rank: int, whole: list[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
        """For each bucket of sender `rank`: where its rows belong, and where they arrive."""
        parts = len(self._groups)
        at = {s.name: tensor[rows_of(s, rank, parts)] for s, tensor in zip(self._specs, whole, strict=True)}
        arrive = [bucket.views(buffer) for bucket, buffer in zip(self._plans[rank], self._buffers[rank], strict=True)]
        return [([at[name] for name in views], list(views.values())) for views in arrive]

    def receive(self, version: PolicyVersion) -> int:
        """Stage `version` and prove it; returns its bytes. Blocks: a thread's work."""
        self.version, self.bit_sums = None, {}
        sums: list[list[Tensor]] = [[] for _ in self._groups]
        flying: dict[int, deque[tuple[int, Any]]] = defaultdict(deque)

        def land(rank: int) -> None:
            k, work = flying[rank].popleft()
            finish(work)
            bucket, buffer = self._plans[rank][k], self._buffers[rank][k]
            sums[rank].append(bucket.sums(buffer, bits=self._with_bit_sums))
            if self._rows:
                torch._foreach_copy_(*self._rows[rank][k])

        # As many on their way as there is room for; the sums of one bucket are taken while the next ones arrive.
        for k, rank in self._in_order():
            if self._rows and len(flying[rank]) == _IN_FLIGHT:
                land(rank)
            flying[rank].append((k, start_broadcast(self._groups[rank], self._buffers[rank][k])))
        for rank in list(flying):
            while flying[rank]:
                land(rank)
        for rank, found in enumerate(sums):
            own = torch.cat(found)
            told = torch.zeros(len(own), 2, dtype=torch.int64, device=self._wire)
            broadcast(self._groups[rank], told)
            self.compare(own[:, :2], told, version, "received", rank)
            self._sums = told
            for spec, value in zip(self._specs, own[:, 2].tolist() if self._with_bit_sums else (), strict=False):
                self.bit_sums[spec.name] = self.bit_sums.get(spec.name, 0) + value
        if self._rows and not self._with_bit_sums:
            self._sums = torch.stack([checksum(t) for t in self.staged.values()])
        wait_for_device(self._wire)
        self.version = version
        return self._num_bytes

    def link(self) -> int:
        """The other end of `Sender.link`. What was staged is gone."""
        self.version = None
        for work in [start_broadcast(self._groups[rank], self._buffers[rank][k]) for k, rank in self._in_order()]:
            finish(work)
        wait_for_device(self._wire)
        return self._num_bytes

    def prove(self, tensors: Mapping[str, Tensor], version: PolicyVersion) -> None:
        """Raise SyncError for the first live tensor whose checksum is not that of what was staged."""
        own = torch.stack([checksum(tensors[spec.name]) for spec in self._specs])
        self.compare(own.to(self._wire), self.sums, version, "live")

    @property
    def sums(self) -> Tensor:
        """int64 [tensors, 2]: `checksum` of every staged tensor, where there are no `bit_sums`."""
        if self._sums is None:
            raise SyncError(f"replica {self._replica} has no checksums: nothing was received")
        return self._sums

    def _in_order(self) -> list[tuple[int, int]]:
        """(bucket, sender): senders in turn."""
        longest = max(len(buckets) for buckets in self._plans)
        return [(k, r) for k in range(longest) for r, buckets in enumerate(self._plans) if k < len(buckets)]

    @property
    def _num_bytes(self) -> int:
        return sum(bucket.num_bytes for buckets in self._plans for bucket in buckets)

    def compare(self, own: Tensor, told: Tensor, version: PolicyVersion, what: str, sender: int | None = None) -> None:
        """Raise SyncError for the first tensor whose sums differ."""
        wrong = (own != told).any(dim=1).nonzero().flatten().tolist()
        if wrong:
            self.version = None
            more = f" and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
            whose = f" (rows of trainer rank {sender})" if sender is not None and len(self._groups) > 1 else ""
            raise SyncError(
                f"replica {self._replica}: {what} weights of version {version} are not the trainer's: {self._specs[wrong[0]].name}"
                f"{more} differ in checksum{whose}; it must not serve them"
            )


class Receiver:
    """One replica's end, where the engine is in this process."""

    def __init__(self, holder: WeightHolder, inbox: Inbox | AdaptedInbox, replica: int) -> None:
        self.inbox = inbox
        self._holder = holder
        self._replica = replica

    @classmethod
    async def join(cls, holder: WeightHolder, store: Any, replica: int, config: Config) -> Receiver:
        """Meet every trainer rank. Raises SyncError, with the first tensor that differs, if the models differ."""
        told = await asyncio.to_thread(told_specs, store)
        _compare_specs(told, specs_of(holder.weights()), replica)
        device = next(iter(holder.weights().values())).device
        return cls(holder, await asyncio.to_thread(join_inbox, told, store, device, replica, config), replica)

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
        self.inbox.prove(self._holder.weights(), version)
        return min(paused + time.perf_counter() - after, time.perf_counter() - start)


def join_inbox(
    specs: list[Spec], store: Any, device: torch.device, replica: int, config: Config, shard: int = 0
) -> Inbox | AdaptedInbox:
    """Meet every trainer rank. Blocks until all devices of the sync are there."""
    wire = wire_device(config, device)
    position = 1 + replica * config.rollout.tensor_model_parallel_size + shard
    size, timeout_s = 1 + config.rollout_devices, config.sync.timeout_s
    groups = [make_group(store, str(r), wire, position, size, timeout_s) for r in range(config.trainer_ranks)]
    bucket_bytes = config.sync.bucket_mb << 20
    # vLLM fuses and splits what it loads: sums of bits prove that where checksums cannot.
    base = Inbox(groups, specs, bucket_bytes, wire, replica, with_bit_sums=config.rollout.engine == "vllm")
    if not config.model.lora_rank:
        return base
    return AdaptedInbox(base, Inbox(groups, told_specs(store, _ADAPTERS), bucket_bytes, wire, replica), config.model.lora_scale)


def tell_specs(shards: Shards, store: Any, rank: int, key: str = _PLAN) -> list[Spec]:
    """The tensors that the trainer sends, in order; rank 0 tells them to the replicas."""
    specs = [Spec(name, tuple(shape), str(dtype).removeprefix("torch.")) for name, shape, dtype, _ in shards]
    if rank == 0:
        store.set(key, msgspec.json.encode(specs))
    return specs


def told_specs(store: Any, key: str = _PLAN) -> list[Spec]:
    """What rank 0 told. Blocks until it has."""
    return msgspec.json.decode(store.get(key), type=list[Spec])


def wire_device(config: Config, device: torch.device) -> torch.device:
    """Where buckets travel: NCCL refuses two ranks on one GPU, so colocated sides meet in host memory."""
    return torch.device("cpu") if config.schedule.colocated else device


def _compare_specs(told: list[Spec], own: list[Spec], replica: int) -> None:
    for t, o in zip(told, own, strict=False):
        if t != o:
            raise SyncError(
                f"replica {replica} has {o.name} {o.dtype}{list(o.shape)} where the trainer has {t.name} {t.dtype}{list(t.shape)}"
            )
    if len(told) != len(own):
        raise SyncError(f"replica {replica} has {len(own)} tensors, the trainer {len(told)}")
