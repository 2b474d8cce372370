"""The pool: it routes requests to replicas and acts on all replicas together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from millrace.ports import Replica, RolloutStats
from millrace.schedule.route import route
from millrace.types import SamplingParams, Segment, Tokens


class RolloutPool:
    """Several replicas behind the port of one.

    A session and its siblings prefer their home replica. Other requests go to the least loaded one
    (see `route`).
    """

    def __init__(self, engines: Sequence[Replica]) -> None:
        self.engines = engines
        self._loads = [0] * len(engines)
        self._homes: dict[str, dict[str, int]] = {}
        """The last replica of each session, by family. The family's own is under its name."""

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        family = _family(session)
        homes = self._homes.setdefault(family, {})
        replica = route(homes.get(session, homes.get(family)), self._loads)
        homes[session] = homes[family] = replica
        self._loads[replica] += 1
        try:
            return await self.engines[replica].generate(tokens, params, session)
        finally:
            self._loads[replica] -= 1

    def forget(self, family: str) -> None:
        """Forget the home replicas of sibling sessions that are over, such as "17"."""
        self._homes.pop(family, None)

    async def interrupt(self) -> None:
        await asyncio.gather(*(engine.interrupt() for engine in self.engines))

    async def stats(self) -> RolloutStats:
        """Return the totals over the replicas."""
        each = await asyncio.gather(*(engine.stats() for engine in self.engines))
        return RolloutStats(
            tokens=sum(s.tokens for s in each),
            prefill_tokens=sum(s.prefill_tokens for s in each),
            busy_slot_s=sum(s.busy_slot_s for s in each),
            slots=sum(s.slots for s in each),
            reused_tokens=sum(s.reused_tokens for s in each),
            evicted_tokens=sum(s.evicted_tokens for s in each),
            cancelled_tokens=sum(s.cancelled_tokens for s in each),
        )

    async def sleep(self, keep_weights: bool = True) -> None:
        await asyncio.gather(*(engine.sleep(keep_weights) for engine in self.engines))

    async def wake_weights(self) -> None:
        await asyncio.gather(*(engine.wake_weights() for engine in self.engines))

    async def wake(self) -> None:
        await asyncio.gather(*(engine.wake() for engine in self.engines))

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))


def _family(session: str) -> str:
    """Return the common name of sibling sessions.

    "17/3" is the fourth trajectory of sample 17, and it has the same prompt as "17/0".
    """
    return session.rpartition("/")[0] or session
