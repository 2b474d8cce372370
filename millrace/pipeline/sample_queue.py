"""The Ledger for concurrent tasks.

A change wakes the tasks that wait for it. Every wait has a deadline and an owner.

Changes are synchronous. `queue.do(ledger.finish, ...)` makes the change, checks the invariants and
wakes waiters, with no await in between. So no task ever sees half a change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from millrace.errors import DeadlineError
from millrace.pipeline.journal import Journal
from millrace.replicas.roster import GRACE_S
from millrace.schedule.ledger import Ledger, Topic
from millrace.waits.registry import count, current, fact, waiting

P = ParamSpec("P")
T = TypeVar("T")

WHOM = {Topic.SLOTS: "trainer", Topic.SAMPLES: "sample *|rollouter", Topic.ROLLOUTS: "sample *"}
"""Who brings a change about, for the graph of waits."""


@dataclass(slots=True, eq=False)
class _Waiter:
    who: str
    what: str
    since: float
    ready: Callable[[], bool]
    woken: asyncio.Future[None]
    limit_s: float
    end: float
    """When its deadline is."""
    timer: asyncio.TimerHandle = field(init=False)


class SampleQueue:
    """The ledger, the request to stop, and the tasks that wait for either to change."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        deadline_s: float,
        journal: Journal | None = None,
    ) -> None:
        """`journal` sees every move of the ledger, and what the loops report."""
        self.ledger = ledger
        self.journal = journal
        self.stopping = False
        self.out_of_grace = False
        self._deadline_s = deadline_s
        self._waiters: dict[Topic, list[_Waiter]] = {topic: [] for topic in Topic}
        fact("ledger", ledger.describe)

    def do(self, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make one change, check the ledger, and wake the tasks whose wait it ends."""
        outcome = change(*args, **kwargs)
        self.ledger.check()
        if self.journal is not None:
            self.journal.moved(self.ledger.moves)
        changed, self.ledger.changed = self.ledger.changed, set()
        for topic in changed:
            self.wake(topic)
        self._report_moves()
        return outcome

    def _report_moves(self) -> None:
        moves, self.ledger.moves = self.ledger.moves, []
        count("moves", len(moves))
        emit = current().registry.emit
        for move in moves:
            facts = {"reason": move.reason} if move.reason else {}
            emit("samples", move.to, "at", str(move.sample_id), facts)

    def wake(self, topic: Topic) -> None:
        """Wake the tasks that wait for `topic` and whose condition is true."""
        for waiter in self._waiters[topic]:
            if not waiter.woken.done() and waiter.ready():
                waiter.woken.set_result(None)

    def stop(self, grace_s: float) -> None:
        """Ask the loops to end after the current window.

        A window that takes longer than `grace_s` seconds from now is cut short.
        """
        self.stopping = True
        asyncio.get_running_loop().call_later(grace_s, self._end_grace)
        self.wake_all()

    async def wait(
        self,
        who: str,
        what: str,
        ready: Callable[[], bool],
        *,
        on: Topic,
        deadline_s: float | None = None,
    ) -> None:
        """Wait until `ready()` is true.

        It is evaluated after each change of the topic `on` and after a stop. Raises DeadlineError
        after `deadline_s` seconds. The error names every waiting task.
        """
        loop = asyncio.get_running_loop()
        limit = self._deadline_s if deadline_s is None else deadline_s
        end = loop.time() + limit
        while not ready():
            waiter = _Waiter(who, what, loop.time(), ready, loop.create_future(), limit, end)
            self._waiters[on].append(waiter)
            self._watch_end(waiter)
            try:
                with waiting(WHOM[on], what):
                    await waiter.woken
            finally:
                waiter.timer.cancel()
                self._waiters[on].remove(waiter)
            end = waiter.end

    def renew(self) -> None:
        """Let the waits for samples begin anew, because a sync that frees slots makes progress."""
        end = asyncio.get_running_loop().time() + GRACE_S
        for waiter in self._waiters[Topic.SAMPLES]:
            waiter.end = max(waiter.end, end + waiter.limit_s)

    def describe(self) -> str:
        """Return one line with every waiting task and the states of the ledger's samples."""
        now = asyncio.get_running_loop().time()
        waiters = sorted(
            (w for each in self._waiters.values() for w in each), key=lambda w: w.since
        )
        waits = "; ".join(
            f"{w.who} waits for {w.what} since {now - w.since:.1f} s" for w in waiters
        )
        return f"{waits or 'nobody waits'}. Ledger: {self.ledger.describe()}"

    def wake_all(self) -> None:
        """Wake the tasks whose condition is true, whatever they wait for."""
        for topic in Topic:
            self.wake(topic)

    def _end_grace(self) -> None:
        self.out_of_grace = True
        self.wake_all()

    def _watch_end(self, waiter: _Waiter) -> None:
        loop = asyncio.get_running_loop()
        waiter.timer = loop.call_at(waiter.end, self._expire, waiter)

    def _expire(self, waiter: _Waiter) -> None:
        if waiter.woken.done():
            return
        if asyncio.get_running_loop().time() < waiter.end:
            self._watch_end(waiter)
        else:
            text = (
                f"{waiter.who} waited {waiter.limit_s:g} s for {waiter.what}. {self.describe()}. "
                "Limit: trainer.wait_deadline_s"
            )
            waiter.woken.set_exception(DeadlineError(text))
