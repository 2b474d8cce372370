"""The Ledger as seen by tasks: every change wakes whoever waits for it, every wait has a deadline and a named owner.

Changes are synchronous: `queue.do(ledger.finish, ...)` moves, checks the invariants and wakes, with no await in between,
so no task ever sees half a move.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from millrace.errors import DeadlineError
from millrace.schedule.ledger import Ledger

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class _Waiter:
    who: str
    what: str
    since: float
    ready: Callable[[], bool]
    woken: asyncio.Future[None]


class SampleQueue:
    """The ledger, the wish to stop, and everyone who waits for either to change."""

    def __init__(self, ledger: Ledger, *, deadline_s: float) -> None:
        self.ledger = ledger
        self.stopping = False
        self.out_of_grace = False
        self._deadline_s = deadline_s
        self._waiters: list[_Waiter] = []

    def do(self, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make one change, check the ledger, wake those whose wait it ends."""
        outcome = change(*args, **kwargs)
        self.ledger.check()
        self.wake()
        return outcome

    def wake(self) -> None:
        """Something that waiters look at has changed."""
        for waiter in self._waiters:
            if not waiter.woken.done() and waiter.ready():
                waiter.woken.set_result(None)

    def stop(self, grace_s: float) -> None:
        """Ask the loops to end at the next cut; a window that takes longer than `grace_s` seconds is cut short."""
        self.stopping = True
        asyncio.get_running_loop().call_later(grace_s, self._end_grace)
        self.wake()

    async def wait(
        self, who: str, what: str, ready: Callable[[], bool], *, deadline_s: float | None = None
    ) -> None:
        """Until `ready()`. Raises DeadlineError, naming everyone who waits, after `deadline_s` seconds."""
        loop = asyncio.get_running_loop()
        limit = self._deadline_s if deadline_s is None else deadline_s
        end = loop.time() + limit
        while not ready():
            waiter = _Waiter(who, what, loop.time(), ready, loop.create_future())
            self._waiters.append(waiter)
            timer = loop.call_at(end, self._expire, waiter, limit)
            try:
                await waiter.woken
            finally:
                timer.cancel()
                self._waiters.remove(waiter)

    def describe(self) -> str:
        """Who waits for what, since when, and what the ledger holds."""
        now = asyncio.get_running_loop().time()
        waits = (
            "; ".join(
                f"{w.who} waits for {w.what} since {now - w.since:.1f} s" for w in self._waiters
            )
            or "nobody waits"
        )
        return f"{waits}. Ledger: {self.ledger.describe()}"

    def _end_grace(self) -> None:
        self.out_of_grace = True
        self.wake()

    def _expire(self, waiter: _Waiter, limit: float) -> None:
        if not waiter.woken.done():
            text = f"{waiter.who} waited {limit:g} s for {waiter.what}. {self.describe()}. Limit: trainer.wait_deadline_s"
            waiter.woken.set_exception(DeadlineError(text))
