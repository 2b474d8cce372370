"""The driver's client of one replica. It survives a restart of the worker."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import replace
from typing import Any

from millrace.errors import DeadlineError, ReplicaLost, WorkerError
from millrace.ports import RolloutStats
from millrace.process.rpc import Peer
from millrace.types import SamplingParams, Segment, Tokens
from millrace.waits.registry import current, within

_POLLS = 8
"""How often a replica is asked for its progress within the time that it may stand still."""
_FIRST_S = 180.0
"""How long a worker may stand still before its first token: kernels may be compiled first."""
_PACE = 4.0
"""A worker may stand still for this many times its longest step of late, such as a prefill."""
_STEPS = 64
"""The newest moves whose longest step counts. So the compilation of kernels is forgotten."""
_EXCUSES = ("receiver.activate", "engine.sleep", "engine.wake_weights", "engine.wake")
"""A replica draws nothing while it serves one of these calls."""


class RemoteRolloutEngine:
    """A Replica in a worker.

    Any call raises ReplicaLost if the worker dies, fails or misses a deadline. While the replica
    has requests, it must draw or read tokens of any of them. Without progress it is lost after
    `stall_s` seconds, or after four times its longest step of late, if that is longer. So a slow
    device is slow and not lost. A long queue, as in a validation, is progress.
    """

    def __init__(self, peer: Peer, *, stall_s: float = math.inf) -> None:
        self.peer = peer
        self.stall_s = stall_s
        self.requests = 0
        """Requests that this replica serves."""
        self._earlier = RolloutStats()
        """The totals of earlier workers. A lost one's last tokens are unknown."""
        self._newest = RolloutStats()
        self._steps: deque[float] = deque(maxlen=_STEPS)
        """Seconds between the newest moves of the worker."""
        self._follower: asyncio.Task[None] | None = None

    def renew(self, peer: Peer) -> None:
        """Take a new worker in place of a lost one."""
        self._earlier = replace(self._earlier + self._newest, slots=0)
        self._newest = RolloutStats()
        self._steps.clear()
        self.peer = peer

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        self.requests += 1
        if self._follower is None:
            with within(current().registry.root):
                self._follower = asyncio.create_task(self._follow(), name="progress")
        try:
            args = tokens, params, session
            return await self._call("engine.generate", args, tuple[Segment, ...])
        finally:
            self.requests -= 1
            if not self.requests and self._follower is not None:
                self._follower.cancel()
                self._follower = None

    async def _follow(self) -> None:
        """Restart the deadlines of requests while the replica draws or reads tokens.

        A replica that stands still is lost. The task runs while there are requests.
        """
        clock = asyncio.get_running_loop().time
        peer, since, last = self.peer, clock(), None
        while True:
            await asyncio.sleep(min(self.stall_s, self.peer.deadline_s) / _POLLS)
            if self.peer is not peer:
                peer, since, last = self.peer, clock(), None
            if peer.death is not None:
                continue  # the requests themselves raise the error
            progress = await self._progress(peer)
            if progress not in (None, last) or peer.is_in(*_EXCUSES):
                if not peer.is_in(*_EXCUSES):
                    self._steps.append(clock() - since)
                since, last = clock(), progress
                peer.progressed("engine.generate")
            elif clock() - since >= self._limit_s(peer):
                slowest = max(self._steps, default=0.0)
                peer.mark_dead(
                    f"worker {peer.name} stood still: {clock() - since:.0f} s without a token, "
                    f"with {self.requests} requests. Limit: rollout.stall_s = {self.stall_s:g}, or "
                    f"{_PACE:g} times its longest step of late ({slowest:.1f} s)"
                )

    def _limit_s(self, peer: Peer) -> float:
        """Return how long the worker may stand still now."""
        pace = max(self.stall_s, _PACE * max(self._steps, default=0.0))
        if self._newest.tokens:
            return min(pace, max(self.stall_s, peer.deadline_s / 2))
        return max(pace, min(_FIRST_S, peer.deadline_s / 2))

    async def _progress(self, peer: Peer) -> tuple[int, int] | None:
        """Return the tokens that the worker has drawn and read. None if it does not answer."""
        try:
            async with asyncio.timeout(min(self.stall_s, peer.deadline_s) / 2):
                stats = await peer.call("engine.stats", (), RolloutStats)
        except (TimeoutError, WorkerError, DeadlineError):
            return None
        if peer is self.peer:
            self._newest = stats
        return stats.tokens, stats.prefill_tokens

    async def interrupt(self) -> None:
        await self._call("engine.interrupt", soon=True)

    async def stats(self) -> RolloutStats:
        """Return the totals of all workers that this replica had."""
        peer = self.peer
        stats = await self._call("engine.stats", (), RolloutStats, soon=True)
        if peer is self.peer:
            self._newest = stats
        return self._earlier + self._newest

    async def sleep(self, keep_weights: bool = True) -> None:
        await self._call("engine.sleep", (keep_weights,))

    async def wake_weights(self) -> None:
        await self._call("engine.wake_weights")

    async def wake(self) -> None:
        await self._call("engine.wake")

    async def close(self) -> None:
        await self._call("engine.close")

    async def _call(
        self, method: str, args: tuple[Any, ...] = (), result: Any = None, *, soon: bool = False
    ) -> Any:
        """Call the worker. Raises ReplicaLost, and the worker is then dead for everybody.

        An answer that comes `soon` is one for which the worker never needs long. It comes later if
        the worker serves a call that may block it.
        """
        peer = self.peer
        soon = soon and not peer.is_in(*_EXCUSES)
        limit_s = min(self._limit_s(peer), peer.deadline_s) if soon else None
        try:
            return await peer.call(method, args, result, deadline_s=limit_s)
        except (WorkerError, DeadlineError) as error:
            peer.mark_dead(str(error))
            raise ReplicaLost(str(error)) from error
