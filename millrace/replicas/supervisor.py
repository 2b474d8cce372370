"""The supervisor of the workers: it hears which ones are lost, ends them and starts others.

waits for  heartbeats; the death of a worker; the back-off before each start
produces   losses in the roster; new workers, STALE until a sync has proven their weights;
           recoveries of the trainer's ranks
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from millrace.errors import MillraceError, NoDevices, ReplicaLost
from millrace.process.rpc import Peer
from millrace.replicas.replica import RemoteRolloutEngine
from millrace.replicas.roster import RESTART, Change, ReplicaState, Roster
from millrace.replicas.trainer_group import TrainerGroup
from millrace.waits.registry import as_actor, current, doing, within

_GOODBYE_S = 30.0
"""How long a replica that leaves may take to give its requests back. Validations end first."""
_AGAIN_S = 0.1
_STRIKES = 3
"""A replica that misses this many heartbeats is lost."""
_RANK_STRIKES = 8
"""The same for a rank of the trainer. Its restart costs more, and it works in larger pieces."""
_FIRST_STRIKES = 30
"""The same while a worker starts: a large import can stop its heartbeats for seconds."""


class ReplicaSupervisor:
    """Keeps the replicas and the ranks of a run going."""

    def __init__(
        self,
        roster: Roster,
        engines: list[RemoteRolloutEngine],
        ranks: TrainerGroup,
        *,
        heartbeat_s: float,
        note: Callable[[str], None],
    ) -> None:
        """`engines` gets the engine of each replica that joins."""
        self.roster, self.engines, self.starter, self.note = roster, engines, ranks.starter, note
        self._ranks, self._heartbeat_s = ranks, heartbeat_s
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._healing: dict[int, asyncio.Task[None]] = {}
        self._starting: dict[int, Peer] = {}
        """The workers whose engines are being built."""
        self._root = current().registry.root
        self._lost_at: dict[int, float] = {}
        """When each replica that does not serve was lost."""
        self._joined_at: dict[int, float] = {}
        """When the worker of each replica that joins was there."""
        self._healed_s: list[float] = []
        """Seconds from a loss until the replica served again, since the last row."""

    @asynccontextmanager
    async def supervise(self) -> AsyncIterator[None]:
        """Keep the workers going while the body runs. Workers that end after it are no loss."""
        async with self._group:
            with self.roster.subscribe(self._changed):
                for i, engine in enumerate(self.engines):
                    self._follow(i, engine.peer, self.roster.incarnation(i))
                self._ranks.follow(self.begin)
                self.begin(self._listen(), "heartbeats")
                try:
                    yield
                finally:
                    self._ranks.follow(None)
                    for engine in self.engines:
                        engine.peer.on_death = lambda reason: None
                    for task in [*self._tasks]:
                        task.cancel()

    async def join(self, replica: int) -> None:
        """Start the worker of a replica that joins. It is STALE until a sync."""
        try:
            peer = await self._start(replica)
        except BaseException:
            self.starter.release(replica)
            raise
        if replica < len(self.engines):
            self.engines[replica].renew(peer)
        else:
            self.engines.append(RemoteRolloutEngine(peer, stall_s=self.engines[0].stall_s))
        self._follow(replica, peer, self.roster.join(replica))

    async def leave(self, replica: int) -> None:
        """Take a replica out of the run. Its requests go on elsewhere with their tokens."""
        self.roster.leave(replica)
        if (heal := self._healing.pop(replica, None)) is not None:
            heal.cancel()
            await asyncio.wait([heal])
        engine = self.engines[replica]
        peer = engine.peer
        with suppress(ReplicaLost, TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                while engine.requests:  # A request may arrive after the interruption.
                    await engine.interrupt()
                    await asyncio.sleep(_AGAIN_S)
        peer.mark_dead("left: a user took the replica out of the run")
        await self.starter.end(peer)
        self.starter.release(replica)

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` until its end, or until the supervisor's end."""
        with within(self._root):  # Whoever sees a loss does not wait for its repair.
            task = self._group.create_task(work, name=name)
        self._tasks.add(task)  # `supervise` ends it
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start(self, replica: int) -> Peer:
        try:
            started = partial(self._starting.__setitem__, replica)
            return await self.starter.start(replica, started)
        finally:
            self._starting.pop(replica, None)

    def _follow(self, replica: int, peer: Peer, incarnation: int) -> None:
        """Let the death of a worker be the loss of its replica."""
        peer.on_death = partial(self.roster.lose, replica, incarnation)
        if peer.death is not None:
            peer.on_death(peer.death)

    async def _listen(self) -> None:
        """Mark workers as dead whose heartbeats stay away.

        A driver that stood still itself misses one heartbeat at most, because it reads what has
        arrived before it counts.
        """
        strikes: dict[Peer, int] = {}
        beats: dict[Peer, int] = {}
        while True:
            await asyncio.sleep(self._heartbeat_s)
            serving = [self.engines[i].peer for i in self.roster.present]
            limits = dict.fromkeys(
                [*self._starting.values(), *self._ranks.starting], _FIRST_STRIKES
            )
            limits |= dict.fromkeys(self._ranks.peers, _RANK_STRIKES)
            limits |= dict.fromkeys(serving, _STRIKES)
            strikes = {p: strikes.get(p, 0) + 1 if p.beats == beats.get(p) else 0 for p in limits}
            beats = {p: p.beats for p in limits}
            for peer, most in limits.items():
                if strikes[peer] >= most:
                    peer.mark_dead(
                        f"worker {peer.name} fell silent: no heartbeat for "
                        f"{most * self._heartbeat_s:g} s (rollout.heartbeat_s)"
                    )

    def _changed(self, change: Change) -> None:
        self._note_change(change)
        if change.to in (ReplicaState.LOST, ReplicaState.RETIRED):
            peer = self.engines[change.replica].peer
            peer.mark_dead(change.why)
            if change.replica not in self._healing:
                heal = as_actor(f"{RESTART}{change.replica}", self._heal(change.replica, peer))
                task = self.begin(heal, f"heal-{change.replica}")
                self._healing[change.replica] = task

    async def _heal(self, replica: int, lost: Peer) -> None:
        """End a lost worker, and start others until one runs or the replica is given up.

        If no devices are left for it, such as after the death of its node, it leaves the run. The
        last replica waits for devices instead.
        """
        with doing("the end of the lost worker"):
            await self.starter.end(lost)
        waits = False
        while self.roster.state(replica) is ReplicaState.LOST:
            with doing("the pause before the next start"):
                await asyncio.sleep(self.roster.backoff_s(replica))
            try:
                with doing("the start of a worker"):
                    peer = await self._start(replica)
            except NoDevices as error:
                if self.roster.members != [replica]:
                    self.roster.leave(replica, str(error))
                elif not waits:
                    waits = True
                    self.note(f"replica rollout-{replica} waits for devices: {error}")
                continue
            except (MillraceError, OSError) as error:
                self.roster.start_failed(replica, str(error))
                continue
            self._healing.pop(replica, None)
            self.engines[replica].renew(peer)
            self._follow(replica, peer, self.roster.restarted(replica))
            return
        self._healing.pop(replica, None)
        self.starter.release(replica)

    # -- notes and figures

    def _note_change(self, change: Change) -> None:
        replica, to, now = change.replica, change.to, asyncio.get_running_loop().time()
        if to is ReplicaState.STALE:
            if replica not in self._lost_at:
                self._joined_at[replica] = now
            return
        joined_at, lost_at = self._joined_at.pop(replica, None), self._lost_at.pop(replica, None)
        name = f"replica rollout-{replica}"
        if to is ReplicaState.LEFT:
            self.note(f"{name} left the run: {change.why}")
        elif to is not ReplicaState.LIVE:
            self._lost_at[replica] = now if lost_at is None else lost_at
            self._note_loss(change, f"{name} {'was lost' if lost_at is None else 'did not start'}")
        elif joined_at is not None:
            self.note(f"{name} serves, {now - joined_at:.1f} s after its worker came")
        elif lost_at is not None:
            self._healed_s.append(now - lost_at)
            self.note(f"{name} serves again, {now - lost_at:.1f} s after its loss")

    def _note_loss(self, change: Change, event: str) -> None:
        """Say why a replica is lost and what follows."""
        replica, roster = change.replica, self.roster
        text = f"{event}: {change.why}"
        if (requests := self.engines[replica].requests) and event.endswith("lost"):
            where = "go on elsewhere" if roster.live else "wait for a replica"
            text += f"; its {requests} requests {where}"
        if change.to is ReplicaState.LOST:
            follows = f"restart in {roster.backoff_s(replica):g} s"
        else:
            left = len(roster) - len(roster.ids(ReplicaState.RETIRED, ReplicaState.LEFT))
            with_whom = f"the run goes on with {left} of {len(roster)} replicas"
            follows = f"it is given up; {with_whom if left else 'no replica is left'}"
        self.note(f"{text}; {follows}")

    def figures(self) -> dict[str, float]:
        """Return the figures for a row, of each side from its first loss on."""
        roster, ranks, row = self.roster, self._ranks, dict[str, float]()
        if ranks.losses:
            row["trainer/lost"] = float(ranks.losses)
            row["trainer/restarts"] = float(ranks.restarts)
            row["trainer/replayed_steps"] = float(ranks.replayed)
            if ranks.seconds:
                row["trainer/recovery_s"] = max(ranks.seconds)
        if (scaled := roster.joined + roster.left) or roster.losses:
            row["replicas/live"] = float(len(roster.live))
            row["replicas/lost"] = float(roster.losses)
            row["replicas/restarts"] = float(roster.restarts)
            if scaled:
                row["replicas/joined"] = float(roster.joined)
                row["replicas/left"] = float(roster.left)
            if self._healed_s:
                row["replicas/heal_s"] = max(self._healed_s)
        ranks.seconds, self._healed_s = [], []
        return row
