"""The receiving end of a policy with low-rank adapters.

The base arrives once, and the adapters arrive with every version. The staged tensors are merged
whole tensors, so engines, proofs and vLLM's loaders need no support for adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from millrace.errors import SyncError
from millrace.sync.buckets import Spec, checksum, checksums
from millrace.sync.groups import wait_for_device
from millrace.sync.membership import Membership, replica_name
from millrace.sync.options import SyncOptions
from millrace.sync.proof import bit_sums
from millrace.sync.staging import StagingBuffer, wire_device
from millrace.sync.table import ADAPTERS, Rows, read_rows, read_specs, sends
from millrace.types import PolicyVersion


class LoraStaging:
    """The weights that one device receives, as in `StagingBuffer`, for a policy with adapters.

    The base stays in memory, so each adapted tensor exists twice: as the base and merged.
    """

    def __init__(
        self, membership: Membership, base: StagingBuffer, adapters: StagingBuffer, scale: float
    ) -> None:
        """Allocate the staged tensors.

        `adapters` receives W.lora_A [rank, in] and W.lora_B [out, rank], float32, for some tensors
        W of `base`. The staged tensor is W + scale x B A.
        """
        self.version: PolicyVersion | None = None
        self.bit_sums: dict[str, int] = {}
        self._membership = membership
        self._base = base
        self._adapters = adapters
        self._scale = scale
        self._base_due = True
        self._adapted = [
            name.removesuffix(".lora_A") for name in adapters.staged if name.endswith(".lora_A")
        ]
        self._sums: Tensor | None = None
        self.staged = base.staged | {
            name: torch.empty_like(base.staged[name]) for name in self._adapted
        }
        """Whole tensors, in the base's order."""

    def regroup(self, generation: int, members: Sequence[int]) -> PolicyVersion | None:
        """Join the groups of `generation`, and return the staged version. This blocks."""
        lacks = self._base.version is None
        self._base_due = self._membership.join(generation, members, lacks_base=lacks)
        return self.version

    def leave(self) -> None:
        """Leave the groups. A transfer under way breaks off. This blocks."""
        self._membership.leave()

    def receive(
        self, version: PolicyVersion, meanwhile: Callable[[], object] = lambda: None
    ) -> int:
        """Stage `version`, verify it, and return the received bytes.

        `meanwhile` is called once the last adapters were asked for. This blocks, so call it in a thread.
        """
        with self._membership.using:
            return self._receive(version, meanwhile)

    def _receive(self, version: PolicyVersion, meanwhile: Callable[[], object]) -> int:
        self.version, received = None, 0
        if self._base_due:  # the trainer sends the base once, even if the transfer fails
            self._base_due = False
            received += self._base.receive(version)
        received += self._adapters.receive(version, meanwhile)
        if self._base.version is None:
            raise SyncError(
                f"version {version} arrived as adapters, but their base never arrived whole; "
                "it must not be served"
            )
        for name in self._adapted:
            base, a, b = (
                self._base.staged[name],
                self._adapters.staged[f"{name}.lora_A"],
                self._adapters.staged[f"{name}.lora_B"],
            )
            self.staged[name].copy_(torch.addmm(base.to(b.dtype), b, a, alpha=self._scale))
        merged = {name: self.staged[name] for name in self._adapted}
        if self._base.bit_sums:
            self.bit_sums = self._base.bit_sums | bit_sums(merged)
        else:
            places = {name: i for i, name in enumerate(self.staged)}
            self._sums = self._base.sums.clone()
            for name, tensor in merged.items():
                self._sums[places[name]] = checksum(tensor)
        wait_for_device(next(iter(merged.values())).device)
        self.version = version
        return received

    def link(self) -> int:
        """Receive the bytes of `Sender.link`. This overwrites the staged version."""
        self.version = None
        return self._adapters.link()

    def prove(self, tensors: Mapping[str, Tensor], version: PolicyVersion) -> Tensor:
        """Return the live tensors' checksums. Raises SyncError if one differs from its staged one."""
        if self._sums is None:
            raise SyncError(f"there are no checksums of version {version}: nothing was received")
        self.version = None  # until the checksums agree
        own = checksums(tensors, self.staged)
        self._base.compare(own.to(self._sums.device), self._sums, version, "live")
        self.version = version
        return own


def join_inbox(
    specs: list[Spec],
    store: Any,
    device: torch.device,
    replica: int,
    agreed: SyncOptions,
    shard: int = 0,
) -> StagingBuffer | LoraStaging:
    """Return the inbox of this device. Its `regroup` joins the trainer ranks that send.

    This blocks until all trainer ranks have told their rows. Raises SyncError unless every row of
    every tensor has one sender.
    """
    table = read_rows(store, specs, agreed.ranks)
    more: dict[int, Rows] = {}
    if agreed.adapter_scale is not None:
        adapters = read_specs(store, ADAPTERS)
        more = read_rows(store, adapters, agreed.ranks, ADAPTERS)
    wire = wire_device(agreed, device)
    senders = [r for r in range(agreed.ranks) if sends(table[r], more.get(r))]
    me = replica_name(replica, shard, agreed.devices)
    membership = Membership(store, agreed, wire, senders, me)
    where = (membership, senders)
    bucket_bytes = agreed.bucket_bytes
    # Serving engines fuse and split tensors on loading. Bit sums verify such tensors, but checksums
    # cannot.
    base = StagingBuffer(
        *where, specs, table, bucket_bytes, wire, replica, with_bit_sums=agreed.serving
    )
    if agreed.adapter_scale is None:
        return base
    return LoraStaging(
        membership,
        base,
        StagingBuffer(*where, adapters, more, bucket_bytes, wire, replica),
        agreed.adapter_scale,
    )
