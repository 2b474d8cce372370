"""The receipt of a version on one device, over one process group for each sending rank."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from millrace.errors import BrokenTransfer, SyncError
from millrace.sync.buckets import Bucket, Spec, checksums, plan
from millrace.sync.groups import (
    LAST,
    Group,
    all_agree,
    broadcast,
    finish,
    member,
    start_broadcast,
    wait_for_device,
)
from millrace.sync.membership import Membership
from millrace.sync.options import SyncOptions
from millrace.sync.table import Rows, part_of, rows_in
from millrace.types import PolicyVersion

IN_FLIGHT = 3  # buckets of one sender


class StagingBuffer:
    """The weights that one device receives: every sender's rows, staged and verified by checksums.

    The staged tensors are separate from the live weights. A replica has one inbox on each of its
    devices.
    """

    def __init__(
        self,
        membership: Membership,
        senders: Sequence[int],
        specs: list[Spec],
        table: Mapping[int, Rows],
        bucket_bytes: int,
        wire: torch.device,
        replica: int,
        *,
        with_bit_sums: bool = False,
    ) -> None:
        """Allocate the staged tensors. `table` is by the ranks of the senders."""
        self.version: PolicyVersion | None = None
        self.bit_sums: dict[str, int] = {}
        """`proof.bit_sum` of every staged tensor by name, if `with_bit_sums`.

        The bit sums then verify the live weights, instead of `prove`.
        """
        self._with_bit_sums = with_bit_sums
        self._membership = membership
        self._senders = senders
        self._specs = specs
        self._wire = wire
        self._replica = replica
        self._plans = {r: plan(part_of(specs, table[r]), bucket_bytes) for r in senders}
        whole = (
            [torch.empty(s.shape, dtype=getattr(torch, s.dtype), device=wire) for s in specs]
            if len(senders) > 1
            else []
        )
        self._buffers = {r: self._landing(p, alone=not whole) for r, p in self._plans.items()}
        # Computed once: this process decodes while a thread receives, and Python work in the thread
        # slows both down.
        self._rows = {r: self._moves(r, whole, table[r]) for r in senders} if whole else {}
        only = senders[0]
        arrive = zip(self._plans[only], self._buffers[only], strict=True)
        self.staged = (
            dict(zip((s.name for s in specs), whole, strict=True))
            if whole
            else {
                name: view
                for bucket, buffer in arrive
                for name, view in bucket.views(buffer).items()
            }
        )
        """Whole tensors, for `swap`."""
        self._sums: Tensor | None = None

    def _landing(self, buckets: list[Bucket], *, alone: bool) -> list[Tensor]:
        """Return the buffers in which a sender's buckets arrive.

        If the sender is `alone`, its tensors are whole and stay in their buffers. Otherwise, the
        buffers are reused in turn, after their rows are copied to the whole tensors.
        """
        if alone:
            return [torch.zeros(b.num_bytes, dtype=torch.uint8, device=self._wire) for b in buckets]
        largest = max(b.num_bytes for b in buckets)
        ring = [
            torch.zeros(largest, dtype=torch.uint8, device=self._wire) for _ in range(IN_FLIGHT)
        ]
        return [ring[k % IN_FLIGHT][: b.num_bytes] for k, b in enumerate(buckets)]

    def _moves(
        self, rank: int, whole: list[Tensor], rows: Rows
    ) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return for each bucket of sender `rank` its copies: (targets, rows in the buffer)."""
        at = {
            s.name: rows_in(tensor, s.name, rows)
            for s, tensor in zip(self._specs, whole, strict=True)
        }
        arrive = [
            bucket.views(buffer)
            for bucket, buffer in zip(self._plans[rank], self._buffers[rank], strict=True)
        ]
        return [([at[name] for name in views], list(views.values())) for views in arrive]

    def regroup(self, generation: int, members: Sequence[int]) -> PolicyVersion | None:
        """Join the groups of `generation`, and return the staged version. This blocks."""
        self._membership.join(generation, members)
        return self.version

    def leave(self) -> None:
        """Leave the groups. A transfer under way breaks off. This blocks."""
        self._membership.leave()

    def receive(
        self, version: PolicyVersion, meanwhile: Callable[[], object] = lambda: None
    ) -> int:
        """Stage `version`, verify it, and return its size in bytes.

        `meanwhile` is called once the last buckets were asked for. This blocks, so call it in a thread.
        """
        with self._membership.using:
            return self._receive(version, self._membership.groups, meanwhile)

    def _receive(
        self, version: PolicyVersion, groups: Mapping[int, Group], meanwhile: Callable[[], object]
    ) -> int:
        self.version, self.bit_sums = None, {}
        _check_joined(groups, self._replica)
        sums: dict[int, list[Tensor]] = {rank: [] for rank in groups}
        in_flight: dict[int, deque[tuple[int, Any]]] = defaultdict(deque)

        def complete_oldest(rank: int) -> None:
            k, work = in_flight[rank].popleft()
            with member(f"trainer-{rank}", rank, version, k):
                finish(work)
            bucket, buffer = self._plans[rank][k], self._buffers[rank][k]
            sums[rank].append(bucket.sums(buffer, bits=self._with_bit_sums))
            if self._rows:
                torch._foreach_copy_(*self._rows[rank][k])

        # As many buckets are in flight as there are buffers. The sums of one bucket are computed
        # while the next ones arrive.
        for k, rank in self._in_order():
            if self._rows and len(in_flight[rank]) == IN_FLIGHT:
                complete_oldest(rank)
            in_flight[rank].append((k, start_broadcast(groups[rank], self._buffers[rank][k])))
        meanwhile()
        for rank in list(in_flight):
            while in_flight[rank]:
                complete_oldest(rank)
        wrong = [self._verify(rank, torch.cat(parts), version) for rank, parts in sums.items()]
        if self._rows and not self._with_bit_sums:
            self._sums = checksums(self.staged, self.staged)
        wait_for_device(self._wire)
        for group in groups.values():
            group.check()
        errors = [error for error in wrong if error is not None]
        self.version = None if errors else version
        # A sender then knows that every replica has the version. One that dies now has it too.
        with contextlib.suppress(BrokenTransfer):
            for group in groups.values():
                all_agree(group, not errors, self._wire)
        for error in errors:
            raise error
        return self._num_bytes

    def _verify(self, rank: int, own: Tensor, version: PolicyVersion) -> SyncError | None:
        """Compare the sums of a sender's rows with its own. Return the error if they differ."""
        sent = torch.zeros(len(own), 2, dtype=torch.int64, device=self._wire)
        with member(f"trainer-{rank}", rank, version, LAST):
            broadcast(self._membership.groups[rank], sent)
        try:
            self.compare(own[:, :2], sent, version, "received", rank)
        except SyncError as error:
            return error
        self._sums = sent
        for spec, value in zip(
            self._specs, own[:, 2].tolist() if self._with_bit_sums else (), strict=False
        ):
            self.bit_sums[spec.name] = self.bit_sums.get(spec.name, 0) + value
        return None

    def link(self) -> int:
        """Receive the bytes of `Sender.link`. This overwrites the staged version."""
        self.version = None
        with self._membership.using:
            groups = self._membership.groups
            _check_joined(groups, self._replica)
            for work in [
                start_broadcast(groups[rank], self._buffers[rank][k])
                for k, rank in self._in_order()
            ]:
                finish(work)
            wait_for_device(self._wire)
        return self._num_bytes

    def prove(self, tensors: Mapping[str, Tensor], version: PolicyVersion) -> Tensor:
        """Return the live tensors' checksums. Raises SyncError if one differs from its staged one.

        The order is that of the staged tensors.
        """
        own = checksums(tensors, self.staged)
        self.compare(own.to(self._wire), self.sums, version, "live")
        return own

    @property
    def sums(self) -> Tensor:
        """The `checksum` of every staged tensor, int64 [tensors, 2], for an inbox without bit sums.

        Raises SyncError if nothing was received.
        """
        if self._sums is None:
            raise SyncError(f"replica {self._replica} has no checksums: nothing was received")
        return self._sums

    def _in_order(self) -> list[tuple[int, int]]:
        """Return the pairs (bucket, sender): bucket 0 of every sender, bucket 1, and so on."""
        longest = max(len(buckets) for buckets in self._plans.values())
        return [
            (k, r) for k in range(longest) for r, buckets in self._plans.items() if k < len(buckets)
        ]

    @property
    def _num_bytes(self) -> int:
        return sum(bucket.num_bytes for buckets in self._plans.values() for bucket in buckets)

    def compare(
        self,
        own: Tensor,
        sent: Tensor,
        version: PolicyVersion,
        stage: str,
        sender: int | None = None,
    ) -> None:
        """Raise SyncError for the first tensor whose sums differ.

        `stage` is "received" or "live".
        """
        wrong = (own != sent).any(dim=1).nonzero().flatten().tolist()
        if wrong:
            self.version = None
            more = f" and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
            whose = (
                f" (rows of trainer rank {sender})"
                if sender is not None and len(self._senders) > 1
                else ""
            )
            raise SyncError(
                f"replica {self._replica}: {stage} weights of version {version} "
                f"are not the trainer's: {self._specs[wrong[0]].name}{more} "
                f"differ in checksum{whose}; it must not serve them"
            )


def wire_device(agreed: SyncOptions, device: torch.device) -> torch.device:
    """Return the device of the buckets in transit.

    NCCL refuses two ranks on one GPU, so colocated engines use host memory.
    """
    return torch.device("cpu") if agreed.colocated or agreed.gloo else device


def _check_joined(groups: Mapping[int, Group], replica: int) -> None:
    """Raise BrokenTransfer if the replica is in no group, because it was left out or never came."""
    if not groups:
        raise BrokenTransfer(f"replica {replica} takes no part in the weight sync")
