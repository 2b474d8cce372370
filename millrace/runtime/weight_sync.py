"""The weight sync on the driver's side: from the trainer's ranks to the replicas that take part."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.errors import BrokenTransfer, ReplicaLost, SyncError
from millrace.ports import TransferReport
from millrace.runtime.remote import all_of, first_error
from millrace.runtime.rpc import Peer
from millrace.types import PolicyVersion


class RemoteWeightSync:
    """A WeightSync between workers. `regroup` says which replicas take part.

    If a call fails because a replica is lost, call `regroup` with the others, and make the call
    again. Nothing is loaded or started again. A SyncError with a `replica` says that the weights
    of this replica are wrong.
    """

    def __init__(self, trainers: Sequence[Peer]) -> None:
        self.generation = 0
        self._trainers = trainers
        self._members: Mapping[int, Peer] = {}
        self._sending: PolicyVersion | None = None
        """The version that the trainer's ranks send in the background."""
        self.kept: PolicyVersion | None = None
        """The kept version that is not live yet. The trainer's weights may be newer."""
        self._staged: dict[int, PolicyVersion | None] = {}

    async def regroup(self, members: Mapping[int, Peer]) -> None:
        """Let the replicas `members` take part from now on, and no others.

        All of them are connected. A transfer under way breaks off. Raises SyncError, with the names
        of those who did not come, at sync.timeout_s.
        """
        self.generation += 1
        self._members, self._sending, self._staged = dict(members), None, {}
        where = (self.generation, sorted(members))
        receivers = [self._ask(i, "regroup", where, PolicyVersion | None) for i in sorted(members)]
        answers = await first_error(
            self._peers, [*(p.call("sender.regroup", where) for p in self._trainers), *receivers]
        )
        self._staged = dict(zip(sorted(members), answers[len(self._trainers) :], strict=True))

    async def keep(self, version: PolicyVersion) -> None:
        """Keep a version. The trainer's ranks begin to send it at once."""
        self.kept = None
        await all_of(self._trainers, "sender.keep", (version,))
        self._sending = self.kept = version

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        if not self._members:
            raise SyncError(f"version {version} has no receiver: no replica takes part in the sync")
        sending, self._sending = self._sending, None
        if self.kept == version and sending != version:
            if all(self._staged[i] == version for i in self._members):
                return TransferReport(0, 0.0)
            await all_of(self._trainers, "sender.resend", (version,))
            sending = version
        if sending == version:
            report = await self._arrival(version)
        else:
            report = await self._both("transfer", (version,))
        self._staged = dict.fromkeys(self._members, version)
        return report

    async def _arrival(self, version: PolicyVersion) -> TransferReport:
        """Wait until all replicas have the version that is on its way, and return the report.

        A version that arrived and was proven needs no answer from the senders. They answer only
        after their next step. If a sender failed or died, its error is the one raised.
        """
        arrived = asyncio.ensure_future(self._ask_all("transfer", (version,), TransferReport))
        sent = asyncio.ensure_future(all_of(self._trainers, "sender.sent"))
        try:
            await asyncio.wait([arrived, sent], return_when=asyncio.FIRST_COMPLETED)
            if sent.done():
                sent.result()
            await asyncio.wait([arrived])
            if arrived.exception() and not any(p.death for p in self._members.values()):
                await sent
            received = arrived.result()
            return TransferReport(received[0].bytes, max(r.seconds for r in received))
        finally:
            arrived.cancel()
            sent.cancel()

    async def link(self) -> TransferReport:
        """Return the bytes of a transfer, and the seconds that the link alone needs for them.

        These are the senders' seconds. Those of a receiver include the call of its engine's workers.
        """
        return await self._both("link", (), seconds_of=len(self._trainers))

    async def transport(self) -> str:
        """Return the name of the transport, such as nccl or gloo."""
        (name, *_) = await all_of(self._trainers, "sender.transport", (), str)
        return str(name)

    async def activate(self, version: PolicyVersion) -> float:
        paused = max(await self._ask_all("activate", (version,), float))
        self.mark_live()
        return paused

    async def activate_one(self, replica: int, version: PolicyVersion) -> float:
        """Make the version live on one replica."""
        return float(await self._ask(replica, "activate", (version,), float))

    def mark_live(self) -> None:
        """Note that the kept version is live. From now on, the trainer's weights are sent."""
        self.kept = None

    def having(self, version: PolicyVersion) -> list[int]:
        """Return the replicas that have staged a version."""
        return [i for i, staged in self._staged.items() if staged == version]

    async def _both(
        self, method: str, args: tuple[object, ...], *, seconds_of: int | None = None
    ) -> TransferReport:
        """Call a method of all senders and receivers. Return the bytes that each replica got.

        The seconds are the longest of the first `seconds_of` reports, the senders' first.
        """
        senders = [p.call(f"sender.{method}", args, TransferReport) for p in self._trainers]
        receivers = [self._ask(i, method, args, TransferReport) for i in self._members]
        reports = await first_error(self._peers, [*senders, *receivers])
        return TransferReport(reports[-1].bytes, max(r.seconds for r in reports[:seconds_of]))

    @property
    def _peers(self) -> list[Peer]:
        return [*self._trainers, *self._members.values()]

    async def _ask_all(self, method: str, args: tuple[object, ...], result: object) -> list[Any]:
        calls = [self._ask(i, method, args, result) for i in self._members]
        return await first_error(list(self._members.values()), calls)

    async def _ask(self, i: int, method: str, args: tuple[object, ...], result: object) -> Any:
        """Call a method of replica i's receiver. Its SyncError has the replica's index.

        ReplicaLost says that its engine has died or stands still, so its worker counts as dead. At
        the first connection nobody would start another one, so the error is the run's.
        """
        peer = self._members[i]
        try:
            return await peer.call(f"receiver.{method}", args, result)
        except BrokenTransfer:
            raise
        except SyncError as error:
            error.replica = i
            raise
        except ReplicaLost as error:
            if self.generation > 1 or method != "regroup":
                peer.mark_dead(str(error))
            raise
