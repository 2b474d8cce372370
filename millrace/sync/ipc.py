"""Weight transfer between two processes on one GPU, by CUDA IPC.

The replica's worker maps the trainer rank's memory and loads the weights from it. This is for
colocated placement, where the replica draws no tokens during a sync. There is no second copy of the
weights. Every trainer rank gathers whole tensors into two slots of GPU memory, in turn. Each bucket
takes two gloo messages: the first announces it with its checksums, and the second confirms that it
is loaded. Both sides find each other by the GPU's UUID.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import TypedStorage

from millrace import codec
from millrace.errors import BrokenTransfer, SyncError
from millrace.ports import TransferReport, WeightSource
from millrace.sync.background import abandonable
from millrace.sync.buckets import Bucket, Spec, plan
from millrace.sync.eight_bit import sums_of
from millrace.sync.groups import Group, finish_send, receive, start_send, wait_for_device
from millrace.sync.membership import Membership, rank_name, replica_name
from millrace.sync.options import SyncOptions
from millrace.sync.table import tell
from millrace.types import PolicyVersion

_SLOTS = 2
_HANDLES = "millrace/sync/ipc"
_PLACES = "millrace/sync/gpu"
_CPU = torch.device("cpu")


_Size = Annotated[int, Meta(ge=0)]


class Slot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of a slot, contiguous GPU memory of a trainer rank, for another process."""

    handle: bytes
    """CUDA's handle of the allocation that contains the slot."""
    storage_bytes: _Size
    storage_offset: _Size
    """Offset of the slot's storage in the allocation."""
    offset: _Size
    """Offset of the slot in its storage."""
    num_bytes: _Size
    counter: bytes
    """torch's reference counter of the mapped storage: a name and an offset."""
    counter_offset: _Size
    event: bytes
    event_needed: bool

    @classmethod
    def of(cls, slot: Tensor) -> Slot:
        """Return the description of a slot, which is a flat tensor of bytes on a GPU."""
        _, (_, size, _, offset, _, _, _, *shared) = reduce_tensor(slot)
        handle, storage_bytes, storage_offset, _, counter, at, event, needed = shared
        return cls(
            handle=handle,
            storage_bytes=storage_bytes,
            storage_offset=storage_offset,
            offset=offset,
            num_bytes=size[0],
            counter=counter,
            counter_offset=at,
            event=event,
            event_needed=needed,
        )

    def mapped(self, device: int) -> Tensor:
        """Return the slot's memory, mapped on this process's `device`."""
        return rebuild_cuda_tensor(
            Tensor,
            torch.Size([self.num_bytes]),
            (1,),
            self.offset,
            TypedStorage,
            torch.uint8,
            device,
            self.handle,
            self.storage_bytes,
            self.storage_offset,
            False,
            self.counter,
            self.counter_offset,
            self.event,
            self.event_needed,
        )


_slots_decoder = codec.decoder(list[Slot])


def slots_of(data: bytes, num_bytes: int) -> list[Slot]:
    """Return the slots that a trainer rank announced. Raises ValueError for any other data."""
    slots: list[Slot] = _slots_decoder.decode(data)
    fits = (s.num_bytes == num_bytes and s.offset + num_bytes <= s.storage_bytes for s in slots)
    if len(slots) != _SLOTS or not all(fits):
        raise ValueError(f"{_SLOTS} slots of {num_bytes} bytes were expected")
    return slots


def fits(agreed: SyncOptions, device: torch.device) -> bool:
    """Return whether CUDA IPC works: both engines share GPUs, and the replica's engine is a serving one."""
    return agreed.colocated and agreed.serving and device.type == "cuda"


class IpcSender:
    """The sending end of one trainer rank, for the replica device on its GPU."""

    def __init__(
        self,
        source: WeightSource,
        membership: Membership,
        rank: int,
        buckets: list[Bucket],
        slots: list[Tensor],
        partner: Callable[[Sequence[int]], str | None],
    ) -> None:
        """`partner` returns the name of the replica device on this GPU, if it takes part."""
        self._source = source
        self._membership = membership
        self._rank = rank
        self._buckets = buckets
        self._slots = slots
        self._partner = partner

    @classmethod
    async def join(
        cls, source: WeightSource, store: Any, rank: int, agreed: SyncOptions
    ) -> IpcSender:
        """Announce the slots. `regroup` joins the replica device that maps them."""
        device = source.device
        specs, _ = tell(source.shards(), store, rank, rows=False)
        buckets = plan(specs, agreed.bucket_bytes)
        largest = max(b.num_bytes for b in buckets)
        slots = [torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(_SLOTS)]
        gpu, devices = _name(device), agreed.devices
        store.set(f"{_HANDLES}/{gpu}", codec.pack([Slot.of(slot) for slot in slots]))
        store.set(f"{_HANDLES}/{gpu}/rank", str(rank))

        def partner(members: Sequence[int]) -> str | None:
            places = (replica_name(i, s, devices) for i in members for s in range(devices))
            return next((p for p in places if store.get(f"{_PLACES}/{p}").decode() == gpu), None)

        membership = Membership(store, agreed, _CPU, [rank], rank_name(rank))
        return cls(source, membership, rank, buckets, slots, partner)

    async def regroup(self, generation: int, members: list[int]) -> None:
        """Leave the old pair, and join the replica device on this GPU, if it takes part."""

        def work() -> None:
            partner = self._partner(members)
            pair = {self._rank: [rank_name(self._rank), partner]} if partner else {}
            self._membership.exchange(generation, pair)

        await abandonable(work)

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Send the current weights as `version`, bucket by bucket.

        This is a collective over the trainer's ranks. A rank whose pair broke takes part to its
        end. A rank whose replica does not take part sends nothing.
        """
        start = time.perf_counter()
        weights = self._source.full_weights()
        pair = self._membership.groups.get(self._rank)
        if pair is not None:
            try:
                self._send(pair, weights)
            except SyncError:
                for _ in weights:
                    pass
                raise
        for _ in weights:
            pass
        return TransferReport(sum(b.num_bytes for b in self._buckets), time.perf_counter() - start)

    def _send(self, pair: Group, weights: Iterator[tuple[str, Tensor]]) -> None:
        sends: list[tuple[Any, Tensor]] = []
        for k, bucket in enumerate(self._buckets):
            if k >= _SLOTS:
                receive(pair, torch.zeros(1), 1)  # the slot's last bucket is loaded
            buffer = self._slots[k % _SLOTS][: bucket.num_bytes].zero_()
            views = bucket.views(buffer)
            for spec in bucket.specs:
                name, tensor = next(weights)
                if name != spec.name:
                    raise SyncError(
                        f"the train engine sends {name}, but the plan expects {spec.name}"
                    )
                views[name].copy_(tensor)
            sums = bucket.sums(buffer).cpu()  # this also waits for the copies into the bucket
            sends.append((start_send(pair, sums, 1), sums))
        for _ in self._buckets[-_SLOTS:]:
            receive(pair, torch.zeros(1), 1)
        for work, _ in sends:
            finish_send(work)

    async def link(self) -> TransferReport:
        """Copy as many bytes within the GPU as a transfer copies."""
        wait_for_device(self._slots[0].device)
        start = time.perf_counter()
        for bucket in self._buckets:
            self._slots[1][: bucket.num_bytes].copy_(self._slots[0][: bucket.num_bytes])
        wait_for_device(self._slots[0].device)
        return TransferReport(sum(b.num_bytes for b in self._buckets), time.perf_counter() - start)

    async def transport(self) -> str:
        """Return the name of the transport in reports."""
        return "cuda ipc"


class IpcStaging:
    """The weights that one replica device receives from the trainer rank on its GPU.

    Each bucket is loaded into the live weights when it arrives.
    """

    def __init__(
        self,
        membership: Membership,
        sender: int,
        buckets: list[Bucket],
        slots: list[Tensor],
        load: Callable[[Iterator[tuple[str, Tensor]]], Any],
        replica: int,
        prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
    ) -> None:
        self.version: PolicyVersion | None = None
        self.bit_sums: dict[str, int] = {}
        """`proof.bit_sum` of every loaded tensor, by name."""
        self._membership = membership
        self._sender = sender
        self._buckets = buckets
        self._slots = slots
        self._load = load
        self._replica = replica
        self._prepare = prepare

    @classmethod
    def join(
        cls,
        specs: list[Spec],
        store: Any,
        device: torch.device,
        replica: int,
        agreed: SyncOptions,
        load: Callable[[Iterator[tuple[str, Tensor]]], Any],
        shard: int = 0,
        prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
    ) -> IpcStaging:
        """Map the slots of the trainer rank on this GPU.

        `load` copies tensors into the live model. `prepare` makes them from received ones.
        """
        name, buckets = _name(device), plan(specs, agreed.bucket_bytes)
        try:
            announced = store.get(f"{_HANDLES}/{name}")
        except RuntimeError as error:  # the store timed out
            raise SyncError(
                f"replica {replica}: no trainer rank joined on its GPU {name}: {error}"
            ) from error
        try:
            descriptions = slots_of(announced, max(b.num_bytes for b in buckets))
        except ValueError as error:
            raise SyncError(
                f"replica {replica}: the store has no slots of a trainer rank "
                f"on its GPU {name}: {error}"
            ) from error
        slots = [slot.mapped(device.index) for slot in descriptions]
        rank = int(store.get(f"{_HANDLES}/{name}/rank"))
        me = replica_name(replica, shard, agreed.devices)
        store.set(f"{_PLACES}/{me}", name)
        membership = Membership(store, agreed, _CPU, [rank], me)
        return cls(membership, rank, buckets, slots, load, replica, prepare)

    def regroup(self, generation: int, members: Sequence[int]) -> PolicyVersion | None:
        """Join the trainer rank on this GPU, and return the staged version. This blocks."""
        membership, sender = self._membership, self._sender
        membership.exchange(generation, {sender: [rank_name(sender), membership.me]})
        return self.version

    def leave(self) -> None:
        """Leave the pair. A transfer under way breaks off. This blocks."""
        self._membership.leave()

    def receive(self, version: PolicyVersion) -> int:
        """Verify and load `version` bucket by bucket, and return its size in bytes. This blocks."""
        with self._membership.using:
            pair = self._membership.groups.get(self._sender)
            if pair is None:
                raise BrokenTransfer(f"replica {self._replica} takes no part in the weight sync")
            return self._receive(version, pair)

    def _receive(self, version: PolicyVersion, pair: Group) -> int:
        self.version, self.bit_sums = None, {}
        loaded: list[tuple[Any, Tensor]] = []
        for k, bucket in enumerate(self._buckets):
            sent = receive(pair, torch.zeros(len(bucket.specs), 2, dtype=torch.int64), 0)
            buffer = self._slots[k % _SLOTS][: bucket.num_bytes]
            sums = bucket.sums(buffer, bits=True).cpu()
            wrong = (sums[:, :2] != sent).any(dim=1).nonzero().flatten().tolist()
            if wrong:
                raise SyncError(
                    f"replica {self._replica}: received weights of version {version} "
                    f"are not the trainer's: {bucket.specs[wrong[0]].name} differs in checksum; "
                    "it must not serve them"
                )
            views = bucket.views(buffer)
            tensors = self._prepare(views)
            self._load(iter(tensors.items()))
            self.bit_sums |= zip(views, sums[:, 2].tolist(), strict=True)
            self.bit_sums |= sums_of(replaced(tensors, views))
            wait_for_device(buffer.device)
            word = torch.zeros(1)
            loaded.append((start_send(pair, word, 0), word))
        for work, _ in loaded:
            finish_send(work)
        self.version = version
        return sum(b.num_bytes for b in self._buckets)

    def link(self) -> int:
        """Return the size of a transfer in bytes. `IpcSender.link` needs no receiver."""
        return sum(b.num_bytes for b in self._buckets)


def replaced(tensors: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are not received ones."""
    return {name: t for name, t in tensors.items() if t is not received.get(name)}


def _name(device: torch.device) -> str:
    """Return the GPU's UUID. A device's number may differ between processes, but not its UUID."""
    return str(torch.cuda.get_device_properties(device).uuid)
