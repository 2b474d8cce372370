"""A weight sync that outlasts the loss of replicas.

It sends to every replica whose worker runs. If one is lost on the way, the others are connected
anew, and the same version is sent again. A replica serves a version only after its proof. If the
trainer's ranks are lost, all replicas are connected with the new ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from millrace.errors import (
    BrokenTransfer,
    CopyGone,
    DeadlineError,
    NoAnswer,
    SyncError,
    WorkerError,
)
from millrace.ports import TransferReport
from millrace.rollout.replica_wait import check, wait_for_replicas
from millrace.rollout.roster import Roster
from millrace.runtime.remote import first_error, wait_for_death
from millrace.runtime.replica import RemoteRolloutEngine
from millrace.runtime.rpc import Peer
from millrace.runtime.trainer_group import TrainerGroup
from millrace.runtime.weight_sync import RemoteWeightSync
from millrace.types import PolicyVersion

_BREAKS = 3
"""How often in a row a transfer may break off although everybody lives."""
_SHARE = 1 / 3
"""The share of the deadline that they may take, if lost ranks are started anew.

Samples and requests wait meanwhile, and the recovery needs time before their deadline too.
"""


class RosterSync:
    """A WeightSync to the replicas that run, whichever these are."""

    def __init__(
        self,
        ranks: TrainerGroup,
        replicas: Sequence[RemoteRolloutEngine],
        roster: Roster,
        *,
        deadline_s: float,
    ) -> None:
        """`deadline_s` limits the wait for a replica, if there is none."""
        self.remote = RemoteWeightSync(ranks.peers)
        ranks.kept = lambda: self.remote.kept
        self._ranks, self._replicas, self._roster = ranks, replicas, roster
        self._deadline_s = deadline_s
        self._members: Mapping[int, int] = {}
        """The replicas that are connected with the senders, with their incarnations."""
        self._peers: Mapping[int, Peer] = {}
        """The workers of these incarnations. A replica may have another one meanwhile."""
        self._senders = ranks.incarnation
        """The incarnation of the ranks with which they are connected."""
        self._sending: PolicyVersion | None = None
        self._proven: Mapping[int, int] = {}
        """The replicas that have the version of the last transfer, with their incarnations."""
        self._breaks = 0
        """Transfers that broke off since the last one that arrived."""
        self._since = 0.0
        """When the first of them began."""

    async def keep(self, version: PolicyVersion) -> None:
        """Keep a version. The trainer's ranks begin to send it at once."""
        await self.connect()
        while self._members:
            members, peers = self._members, self._peers
            self._begin()
            try:
                await self.remote.keep(version)
            except (WorkerError, SyncError, DeadlineError) as error:
                if not await self._explained(error, members, peers):
                    raise
                await self.connect()
            else:
                self._sending = version
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
            members, peers, self._proven = self._members, self._peers, {}
            if not members:
                return TransferReport(0, 0.0)
            self._begin()
            try:
                report = await self.remote.transfer(version)
            except CopyGone:
                able, self._members = self.remote.having(version), {}
            except (WorkerError, SyncError, DeadlineError) as error:
                if not await self._explained(error, members, peers):
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
        self.remote.mark_live()
        return pause_s

    async def _activate(self, replica: int, incarnation: int, version: PolicyVersion) -> float:
        """Make the version live on one replica. Return the pause, 0 if the replica is lost."""
        if self._roster.present.get(replica) != incarnation:
            return 0.0
        peer = self._replicas[replica].peer
        try:
            pause_s = await self.remote.activate_one(replica, version)
        except (WorkerError, DeadlineError) as error:
            peer.mark_dead(str(error))
            self._roster.lose(replica, incarnation, str(error))
            return 0.0
        self._roster.proven(replica, incarnation)
        return pause_s

    async def connect(self, able: Sequence[int] | None = None) -> None:
        """Connect the senders with the replicas that run now. Wait for one if there is none.

        With `able`, these alone count, and nobody waits for another one.
        """
        roster = self._roster
        while True:
            await self._ranks.ready()
            senders = self._ranks.incarnation
            check(roster)
            present = roster.present
            if able is not None:
                present = {i: k for i, k in present.items() if i in able}
            if not present and able is None and not roster.over:
                await wait_for_replicas(roster, "a weight sync", self._ready, self._deadline_s)
                continue
            same = present == self._members and senders == self._senders
            if not present or same:
                self._members = present
                return
            peers = {i: self._replicas[i].peer for i in present}
            self._peers, self._senders = peers, senders
            self._begin()
            try:
                meet = [self._ranks.starter.meet(i, peer) for i, peer in peers.items()]
                await first_error([*peers.values()], meet)
                await self.remote.regroup(peers)
            except (WorkerError, SyncError, DeadlineError) as error:
                self._members = {}
                if not await self._explained(error, present, peers):
                    raise
            else:
                self._members = present
                return

    def _begin(self) -> None:
        if not self._breaks:
            self._since = asyncio.get_running_loop().time()

    def _ready(self) -> bool:
        check(self._roster)
        return bool(self._roster.present) or self._roster.over

    async def _explained(
        self, error: Exception, members: Mapping[int, int], peers: Mapping[int, Peer]
    ) -> bool:
        """Mark the members that died as lost. Return whether the sync goes on after the error.

        The loss of the trainer's ranks explains it too, once others have their place. A worker
        that does not answer counts as dead, but a rank only if others can have its place. A
        transfer that breaks off although everybody lives is made again, a few times, for a third of
        the deadline. After that, the ranks count as lost, because one of them may hang. Raises
        WorkerError if the ranks are lost for good.
        """
        ranks = self._ranks
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
