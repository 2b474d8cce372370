"""The keeper of the workers: it hears which ones are lost, ends them and starts others.

waits for  heartbeats; the death of a worker; the back-off before each start
produces   losses in the roster; new workers, STALE until a sync has proven their weights;
           recoveries of the trainer's ranks
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from millrace.errors import MillraceError
from millrace.rollout.patience import RESTART
from millrace.rollout.roster import Change, Roster, Standing
from millrace.run.news import News
from millrace.runtime.ranks import Ranks
from millrace.runtime.replica import RemoteRolloutEngine
from millrace.runtime.rpc import Peer
from millrace.waits.registry import as_actor, current, doing, within

_STRIKES = 3
"""A replica that misses this many heartbeats is lost."""
_RANK_STRIKES = 8
"""The same for a rank of the trainer. Its restart costs more, and it works in larger pieces."""
_FIRST_STRIKES = 30
"""The same while a worker starts: a large import can stop its heartbeats for seconds."""


class Starter(Protocol):
    """Starts and ends the workers of replicas."""

    async def start(self, replica: int, started: Callable[[Peer], None]) -> Peer:
        """Start a worker and build its engine. Call `started` as soon as the worker answers."""
        ...

    async def end(self, peer: Peer) -> None:
        """End a worker at once, with all processes that it started."""
        ...


class Keeper:
    """Keeps the replicas and the ranks of a run going while the body of `async with` runs."""

    def __init__(
        self,
        roster: Roster,
        engines: Sequence[RemoteRolloutEngine],
        ranks: Ranks,
        starter: Starter,
        *,
        heartbeat_s: float,
    ) -> None:
        self.news = News(roster, engines, ranks)
        self.roster = roster
        self._ranks = ranks
        self._engines = engines
        self._starter = starter
        self._heartbeat_s = heartbeat_s
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._healing: set[int] = set()
        self._starting: dict[int, Peer] = {}
        """The workers whose engines are being built."""
        self._ends = ExitStack()
        self._root = current().registry.root

    async def __aenter__(self) -> Keeper:
        await self._group.__aenter__()
        self._ends.enter_context(self.roster.told(self.news))
        self._ends.enter_context(self.roster.told(self._changed))
        for i, engine in enumerate(self._engines):
            self._follow(i, engine.peer, self.roster.incarnation(i))
        self._ranks.follow(self._begin)
        self._begin(self._listen(), "heartbeats")
        return self

    async def __aexit__(self, *error: Any) -> None:
        """End all tasks. Workers that end from now on are no loss. Raises the error of a task."""
        self._ends.close()
        self._ranks.follow(None)
        for engine in self._engines:
            engine.peer.on_death = lambda reason: None
        for task in [*self._tasks]:
            task.cancel()
        await self._group.__aexit__(*error)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        with within(self._root):  # Whoever sees a loss does not wait for its repair.
            task = self._group.create_task(work, name=name)
        self._tasks.add(task)  # `__aexit__` ends it
        task.add_done_callback(self._tasks.discard)
        return task

    def _follow(self, replica: int, peer: Peer, incarnation: int) -> None:
        """Let the death of a worker be the loss of its replica."""

        def died(why: str) -> None:
            self.roster.lose(replica, incarnation, why)

        peer.on_death = died
        if peer.death is not None:
            self.roster.lose(replica, incarnation, peer.death)

    async def _listen(self) -> None:
        """Mark workers as dead whose heartbeats stay away.

        A driver that stood still itself misses one heartbeat at most, because it reads what has
        arrived before it counts.
        """
        strikes: dict[Peer, int] = {}
        beats: dict[Peer, int] = {}
        while True:
            await asyncio.sleep(self._heartbeat_s)
            serving = [self._engines[i].peer for i in self.roster.present]
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
        if change.to in (Standing.LOST, Standing.RETIRED):
            peer = self._engines[change.replica].peer
            peer.mark_dead(change.why)
            if change.replica not in self._healing:
                self._healing.add(change.replica)
                heal = as_actor(f"{RESTART}{change.replica}", self._heal(change.replica, peer))
                self._begin(heal, f"heal-{change.replica}")

    async def _heal(self, replica: int, lost: Peer) -> None:
        """End a lost worker, and start others until one runs or the replica is given up."""
        with doing("the end of the lost worker"):
            await self._starter.end(lost)
        while self.roster.state(replica) is Standing.LOST:
            with doing("the pause before the next start"):
                await asyncio.sleep(self.roster.backoff_s(replica))
            try:
                with doing("the start of a worker"):
                    peer = await self._starter.start(
                        replica, partial(self._starting.__setitem__, replica)
                    )
            except (MillraceError, OSError) as error:
                self.roster.start_failed(replica, str(error))
                continue
            finally:
                self._starting.pop(replica, None)
            self._healing.discard(replica)
            self._engines[replica].renew(peer)
            self._follow(replica, peer, self.roster.restarted(replica))
            return
