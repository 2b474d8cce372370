"""The pool: it routes requests to replicas and acts on all replicas together.

A replica may be lost at any time. Its requests then return without a token, and go on elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from millrace.errors import ReplicaLost
from millrace.ports import Replica, RolloutStats
from millrace.replicas.roster import RESTART, Roster
from millrace.schedule.route import route
from millrace.types import SamplingParams, Segment, Tokens
from millrace.waits.registry import at, span

T = TypeVar("T")

_DEADLINE_S = 1800.0


class RolloutPool:
    """Several replicas behind the port of one.

    A session and its siblings prefer their home replica. Other requests go to the least loaded one
    (see `route`). Replicas that are LIVE in the `roster` serve. A request waits while there is
    none, at most `deadline_s` seconds.
    """

    def __init__(
        self,
        engines: Sequence[Replica],
        roster: Roster | None = None,
        *,
        deadline_s: float = _DEADLINE_S,
    ) -> None:
        self.engines = engines
        """One for each replica of the roster. It may get others."""
        self.roster = Roster(len(engines)) if roster is None else roster
        self.deadline_s = deadline_s
        self._loads = Counter[int]()
        self._homes: dict[str, dict[str, int]] = {}
        """The last replica of each session, by family. The family's own is under its name."""
        self._last: dict[int, RolloutStats] = {}
        """The newest totals of each replica. Those of a lost one still count."""
        self._interruptions = 0

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        """Draw on one replica. Return no segment if it is lost, or if an interruption came first.

        Raises ReplicaLost once every replica is given up. A request that is not interruptible needs
        the live weights of now, so it raises ReplicaLost as soon as no replica has them.
        """
        live = self.roster.live
        if not live:
            if not params.interruptible:
                raise ReplicaLost(f"no replica has the live weights: {self.roster.describe()}")
            await self._wait()
            return ()
        # "17/3" is the fourth trajectory of sample 17, and it has the same prompt as "17/0".
        family = session.rpartition("/")[0] or session
        homes = self._homes.setdefault(family, {})
        home = homes.get(session, homes.get(family))
        at_home = live.index(home) if home in live else None
        replica = live[route(at_home, [self._loads[i] for i in live])]
        homes[session] = homes[family] = replica
        incarnation = self.roster.incarnation(replica)
        self._loads[replica] += 1
        try:
            return await self.draw_on(replica, tokens, params, session)
        except ReplicaLost as error:
            self.roster.lose(replica, incarnation, str(error))
            return ()
        finally:
            self._loads[replica] -= 1

    async def draw_on(
        self, replica: int, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        """Draw on this replica. Raises ReplicaLost."""
        with span(f"rollout-{replica}", "request", session) as request:
            segments = await self.engines[replica].generate(tokens, params, session)
            facts, versions = request.facts, [[s.version, len(s.tokens)] for s in segments]
            facts["versions"], facts["tokens"] = versions, sum([count for _, count in versions])
            facts["stop"] = str(segments[-1].stop) if segments else "interrupted"
        return segments

    async def interrupt_on(self, replica: int) -> None:
        await self._act(replica, "interrupt")

    async def stats_of(self, replica: int) -> RolloutStats:
        stats = await self.engines[replica].stats()
        at(f"rollout-{replica}", "stats", stats=stats)
        return stats

    async def _wait(self) -> None:
        """Wait until a replica serves, or until an interruption."""
        before = self._interruptions

        def ready() -> bool:
            self.roster.check()
            return bool(self.roster.live) or self._interruptions != before

        whom = f"{RESTART}*|sync|trainer"  # One that runs again needs a sync before it serves.
        await self.roster.wait("a request", ready, self.deadline_s, whom)

    def forget(self, family: str) -> None:
        """Forget the home replicas of sibling sessions that are over, such as "17"."""
        self._homes.pop(family, None)

    async def interrupt(self) -> None:
        """Interrupt every replica that runs, and the requests that wait for one."""
        self._interruptions += 1
        waits = self.roster.wake_waits()
        await self._each(self.interrupt_on)
        if waits:
            await asyncio.sleep(0)

    async def stats(self) -> RolloutStats:
        """Return the totals over the replicas. A lost one has no slots."""
        self._last |= await self._each(self.stats_of)
        present = self.roster.present
        each = (s if i in present else replace(s, slots=0) for i, s in self._last.items())
        return sum(each, RolloutStats())

    async def sleep(self, keep_weights: bool = True) -> None:
        await self._each(lambda replica: self._act(replica, "sleep", keep_weights))

    async def wake_weights(self) -> None:
        await self._each(lambda replica: self._act(replica, "wake_weights"))

    async def wake(self) -> None:
        await self._each(lambda replica: self._act(replica, "wake"))

    async def close(self) -> None:
        await self._each(lambda replica: self.engines[replica].close())

    async def _act(self, replica: int, method: str, *args: object) -> None:
        """Call a method of a replica as a span on its track."""
        with span(f"rollout-{replica}", method):
            await getattr(self.engines[replica], method)(*args)

    async def _each(self, call: Callable[[int], Awaitable[T]]) -> dict[int, T]:
        """Call every replica that runs, and return the answers of those that are not lost."""

        async def one(replica: int, incarnation: int) -> None:
            try:
                answers[replica] = await call(replica)
            except ReplicaLost as error:
                self.roster.lose(replica, incarnation, str(error))

        answers: dict[int, T] = {}
        await asyncio.gather(*(one(i, k) for i, k in self.roster.present.items()))
        return answers
