"""The driver of the weight sync, which outlasts the loss of replicas and of the trainer's ranks.

It sends to every replica whose worker runs. If one is lost on the way, the others are connected
anew, and the same version is sent again. Nothing is loaded or started for that. A replica serves a
version only after its proof. If the trainer's ranks are lost, all replicas are connected with the
new ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.errors import (
    BrokenTransfer,
    CopyGone,
    DeadlineError,
    NoAnswer,
    ReplicaLost,
    SyncError,
    WorkerError,
)
from millrace.ports import TransferReport
from millrace.process.rpc import Peer, all_of, first_error, wait_for_death
from millrace.replicas.replica import RemoteRolloutEngine
from millrace.replicas.roster import Roster
from millrace.replicas.trainer_group import TrainerGroup
from millrace.types import PolicyVersion

_BREAKS = 3
"""How often in a row a transfer may break off although everybody lives."""
_SHARE = 1 / 3
"""The share of the deadline that they may take, if lost ranks are started anew.

Samples and requests wait meanwhile, and the recovery needs time before their deadline too.
"""


class WeightSyncDriver:
    """A WeightSync from the trainer's ranks to the replicas that run, whichever these are.

    A SyncError with a `replica` says that the weights of this replica are wrong.
    """

    def __init__(
        self,
        ranks: TrainerGroup,
        replicas: Sequence[RemoteRolloutEngine],
        roster: Roster,
        *,
        deadline_s: float,
    ) -> None:
        """`deadline_s` limits the wait for a replica, if there is none."""
        self._ranks, self._replicas, self._roster = ranks, replicas, roster
        self._deadline_s = deadline_s
        self._generation = 0
        """Groups of senders and receivers so far."""
        self._members: Mapping[int, int] = {}
        """The replicas that are connected with the senders, with their incarnations."""
        self._peers: Mapping[int, Peer] = {}
        """The workers of these incarnations. A replica may have another one meanwhile."""
        self._senders = ranks.incarnation
        """The incarnation of the ranks with which they are connected."""
        self._sending: PolicyVersion | None = None
        """The version that the trainer's ranks send in the background."""
        self._staged: dict[int, PolicyVersion | None] = {}
        """The version that each connected replica has and that is not live."""
        self._proven: Mapping[int, int] = {}
        """The replicas that have the version of the last transfer, with their incarnations."""
        self._breaks = 0
        """Transfers that broke off since the last one that arrived."""
        self._since = 0.0
        """When the first of them began."""

    # -- the port

    async def keep(self, version: PolicyVersion) -> None:
        """Keep a version. The trainer's ranks begin to send it at once."""
        await self.connect()
        while self._members:
            self._begin()
            self._ranks.kept = None
            try:
                await all_of(self._ranks.peers, "sender.keep", (version,))
            except (WorkerError, SyncError, DeadlineError) as error:
                if not await self._explained(error, self._members):
                    raise
                await self.connect()
            else:
                self._sending = self._ranks.kept = version
                return

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        """Send a version to every replica that runs. Wait for one if there is none.

        It goes to nobody if every replica is given up, and the run saves before it ends. The same
        is true if all replicas that had the version are lost, and its copy is freed: the next
        version then follows.
        """
        able: list[int] | None = None
        while True:
            await self._ranks.ready()
            old = self._senders != self._ranks.incarnation
            sending, self._sending = self._sending == version and not old, None
            if not sending:
                await self.connect(able)
            members, self._proven = self._members, {}
            if not members:
                return TransferReport(0, 0.0)
            self._begin()
            try:
                report = await self._send(version, sending=sending)
            except CopyGone:
                able = [i for i, staged in self._staged.items() if staged == version]
                self._members = {}
            except (WorkerError, SyncError, DeadlineError) as error:
                if not await self._explained(error, members):
                    raise
                self._members = {}
            else:
                self._proven, self._breaks = members, 0
                return report

    async def activate(self, version: PolicyVersion) -> float:
        """Make the version live on the replicas that have it. Return the longest pause.

        If all of them are lost, the version is sent again to those that run next.
        """
        pause_s = 0.0
        while self._proven:
            pauses = await asyncio.gather(
                *(self._activate(i, k, version) for i, k in self._proven.items())
            )
            if self._roster.live:
                pause_s = max(pauses)
                break
            await self.transfer(version)
        self._ranks.kept = None  # From now on, the trainer's weights are sent.
        return pause_s

    # -- for benchmarks

    async def link(self) -> TransferReport:
        """Return the bytes of a transfer, and the seconds that the link alone needs for them.

        These are the senders' seconds. Those of a receiver include the call of its engine's workers.
        """
        return await self._both("link", (), seconds_of=len(self._ranks.peers))

    async def transport(self) -> str:
        """Return the name of the transport, such as nccl or gloo."""
        return (await all_of(self._ranks.peers, "sender.transport", (), str))[0]

    # -- members

    async def connect(self, able: Sequence[int] | None = None) -> None:
        """Connect the senders with the replicas that run now. Wait for one if there is none.

        A transfer under way breaks off. With `able`, these replicas alone count, and nobody waits
        for another one. Raises SyncError, with the names of those who did not come, at
        sync.timeout_s.
        """
        roster = self._roster
        while True:
            await self._ranks.ready()
            senders = self._ranks.incarnation
            roster.check()
            present = roster.present
            if able is not None:
                present = {i: k for i, k in present.items() if i in able}
            if not present and able is None and not roster.over:
                ready = lambda: bool(roster.present) or roster.over  # noqa: E731
                await roster.wait("a weight sync", ready, self._deadline_s)
                continue
            same = present == self._members and senders == self._senders
            if not present or same:
                self._members = present
                return
            self._peers = {i: self._replicas[i].peer for i in present}
            self._senders = senders
            self._begin()
            try:
                meet = [self._ranks.starter.meet(i, peer) for i, peer in self._peers.items()]
                await first_error([*self._peers.values()], meet)
                await self._regroup()
            except (WorkerError, SyncError, DeadlineError) as error:
                self._members = {}
                if not await self._explained(error, present):
                    raise
            else:
                self._members = present
                return

    async def _regroup(self) -> None:
        """Let the replicas in `_peers` take part from now on, and no others."""
        self._generation += 1
        self._sending, self._staged = None, {}
        where, ranks = (self._generation, [*self._peers]), self._ranks.peers
        senders = [peer.call("sender.regroup", where) for peer in ranks]
        receivers = [self._ask(i, "regroup", where, PolicyVersion | None) for i in self._peers]
        answers = await first_error([*ranks, *self._peers.values()], [*senders, *receivers])
        self._staged = dict(zip(self._peers, answers[len(senders) :], strict=True))

    def _begin(self) -> None:
        if not self._breaks:
            self._since = asyncio.get_running_loop().time()

    async def _explained(self, error: Exception, members: Mapping[int, int]) -> bool:
        """Mark the members that died as lost. Return whether the sync goes on after the error.

        The loss of the trainer's ranks explains it too, once others have their place. A worker
        that does not answer counts as dead, but a rank only if others can have its place. A
        transfer that breaks off although everybody lives is made again, a few times, for a third of
        the deadline. After that, the ranks count as lost, because one of them may hang. Raises
        WorkerError if the ranks are lost for good.
        """
        ranks, peers = self._ranks, self._peers
        if isinstance(error, NoAnswer):
            for peer in (*(ranks.peers if ranks.able else ()), *peers.values()):
                if peer.name == error.worker:
                    peer.mark_dead(str(error))
        if ranks.incarnation == self._senders:
            await wait_for_death([*ranks.peers, *peers.values()])
        if await ranks.gone(self._senders):
            self._breaks = 0
            return True
        if ranks.death:
            raise WorkerError(ranks.death)
        lost = {i: peer.death for i, peer in peers.items() if peer.death}
        for i, why in lost.items():
            self._roster.lose(i, members[i], why)
        if not lost and isinstance(error, BrokenTransfer):
            self._breaks += 1
            late = asyncio.get_running_loop().time() - self._since > self._deadline_s * _SHARE
            if self._breaks < _BREAKS and not (late and ranks.able):
                ranks.note(f"a weight transfer broke off and is made again: {error}")
                return True
            if ranks.able:
                breaks, self._breaks = self._breaks, 0
                ranks.lose(f"weight transfers in a row that broke off: {breaks}. {error}")
                return await ranks.gone(self._senders)
        return bool(lost)

    # -- calls of the members

    async def _send(self, version: PolicyVersion, *, sending: bool) -> TransferReport:
        """Send a version, unless it is on its way, and wait until all replicas have it.

        The trainer's weights may be newer than those of a kept version.
        """
        kept = sending or self._ranks.kept == version
        if kept and not sending:
            if all(staged == version for staged in self._staged.values()):
                return TransferReport(0, 0.0)
            await all_of(self._ranks.peers, "sender.resend", (version,))
        report = await (self._arrival(version) if kept else self._both("transfer", (version,)))
        self._staged = dict.fromkeys(self._peers, version)
        return report

    async def _arrival(self, version: PolicyVersion) -> TransferReport:
        """Wait until all replicas have the version that is on its way, and return the report.

        A version that arrived and was proven needs no answer from the senders. They answer only
        after their next step. If a sender failed or died, its error is the one raised.
        """
        peers = [*self._peers.values()]
        calls = [self._ask(i, "transfer", (version,), TransferReport) for i in self._peers]
        arrived = asyncio.ensure_future(first_error(peers, calls))
        sent = asyncio.ensure_future(all_of(self._ranks.peers, "sender.sent"))
        try:
            await asyncio.wait([arrived, sent], return_when=asyncio.FIRST_COMPLETED)
            if sent.done():
                sent.result()
            await asyncio.wait([arrived])
            if arrived.exception() and not any(peer.death for peer in peers):
                await sent
            received = arrived.result()
            return TransferReport(received[0].bytes, max(r.seconds for r in received))
        finally:
            arrived.cancel()
            sent.cancel()

    async def _both(
        self, method: str, args: tuple[object, ...], *, seconds_of: int | None = None
    ) -> TransferReport:
        """Call a method of all senders and receivers. Return the bytes that each replica got.

        The seconds are the longest of the first `seconds_of` reports, the senders' first.
        """
        ranks = self._ranks.peers
        senders = [peer.call(f"sender.{method}", args, TransferReport) for peer in ranks]
        receivers = [self._ask(i, method, args, TransferReport) for i in self._peers]
        peers = [*ranks, *self._peers.values()]
        reports = await first_error(peers, [*senders, *receivers])
        return TransferReport(reports[-1].bytes, max(r.seconds for r in reports[:seconds_of]))

    async def _activate(self, replica: int, incarnation: int, version: PolicyVersion) -> float:
        """Make the version live on one replica. Return the pause, 0 if the replica is lost."""
        if self._roster.present.get(replica) != incarnation:
            return 0.0
        peer = self._replicas[replica].peer
        try:
            pause_s: float = await self._ask(replica, "activate", (version,), float)
        except (WorkerError, DeadlineError) as error:
            peer.mark_dead(str(error))
            self._roster.lose(replica, incarnation, str(error))
            return 0.0
        self._roster.proven(replica, incarnation)
        return pause_s

    async def _ask(self, i: int, method: str, args: tuple[object, ...], result: object) -> Any:
        """Call a method of replica i's receiver. Its SyncError has the replica's index.

        ReplicaLost says that its engine has died or stands still, so its worker counts as dead. At
        the first connection nobody would start another one, so the error is the run's.
        """
        peer = self._peers[i]
        try:
            return await peer.call(f"receiver.{method}", args, result)
        except BrokenTransfer:
            raise
        except SyncError as error:
            error.replica = i
            raise
        except ReplicaLost as error:
            if self._generation > 1 or method != "regroup":
                peer.mark_dead(str(error))
            raise
