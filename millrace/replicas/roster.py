"""The roster: which replicas serve, as a state machine without tasks, and the waits for them.

    LIVE -> LOST -> STALE -> LIVE        LOST -> RETIRED
    STALE -> LOST                        any -> LEFT -> STALE

| state | meaning |
|---|---|
| LIVE | it has the live weights and serves requests |
| LOST | it died, fell silent or stood still; its worker is ended and started anew |
| STALE | its worker runs again; it serves nothing until a sync has proven its weights |
| RETIRED | it was lost too often in a row; the run goes on without it |
| LEFT | a user took it out, or its node is gone; it is not started anew |

Each start of a worker is an incarnation of its replica. News of an older incarnation change
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from millrace.errors import DeadlineError, ReplicaLost
from millrace.waits.registry import waiting

RESTART = "restart of rollout-"
"""The start of the names of actors that start the workers of lost replicas."""
GRACE_S = 5.0
"""Extra seconds beyond the rank's own deadline, so that the rank's error comes first.

A call that misses its deadline is found up to a second later, and its worker counts as dead up to
three seconds after that. The recovery of the trainer then renews the wait.
"""
_LONGEST_S = 60.0


class ReplicaState(StrEnum):
    """The state of a replica."""

    LIVE = "live"
    LOST = "lost"
    STALE = "stale"
    RETIRED = "retired"
    LEFT = "left"


PRESENT = (ReplicaState.LIVE, ReplicaState.STALE)
"""Replicas with a running worker. A sync sends to these."""


class Change(NamedTuple):
    """A move of one replica."""

    replica: int
    to: ReplicaState
    why: str = ""
    """The reason of a loss."""


Listener = Callable[[Change], None]


@dataclass(slots=True)
class _Entry:
    state: ReplicaState = ReplicaState.LIVE
    incarnation: int = 0
    failures: int = 0
    """Losses and failed starts in a row, since it last served a whole version."""
    why: str = ""
    """The reason of the last loss."""


class Roster:
    """The replicas of a run. A replica may be started `max_restarts` times in a row."""

    def __init__(self, count: int, *, max_restarts: int = 0) -> None:
        self.max_restarts = max_restarts
        self.saves = False
        """Whether the run saves before it ends, once every replica is given up."""
        self.losses = self.restarts = self.joined = self.left = 0
        self._entries = [_Entry() for _ in range(count)]
        self._listeners: list[Listener] = []
        self._waits: list[asyncio.Event] = []
        """Each is set at a change."""
        self._renewed: list[Callable[[], None]] = []
        """Functions that renew the deadlines of those who wait for a replica or a sync."""

    def __len__(self) -> int:
        return len(self._entries)

    # -- moves

    def lose(self, replica: int, incarnation: int, why: str) -> bool:
        """Note that an incarnation is lost. Return False if this is old news."""
        entry = self._entries[replica]
        if entry.incarnation != incarnation or entry.state not in PRESENT:
            return False
        self.losses += 1
        self._fail(replica, why)
        return True

    def start_failed(self, replica: int, why: str) -> None:
        """Note that a lost replica did not start."""
        self._expect(replica, ReplicaState.LOST)
        self._fail(replica, why)

    def restarted(self, replica: int) -> int:
        """Note that a new worker of a lost replica runs. Return its incarnation."""
        entry = self._expect(replica, ReplicaState.LOST)
        entry.incarnation += 1
        self.restarts += 1
        self._move(replica, ReplicaState.STALE)
        return entry.incarnation

    def leave(self, replica: int, why: str = "`millrace scale` took it out") -> None:
        """Take a replica out of the run. This is no loss."""
        self._entries[replica].why = why
        self.left += 1
        self._move(replica, ReplicaState.LEFT)

    def join(self, replica: int) -> int:
        """Note that the worker of a new replica runs. Return its incarnation.

        The replica is one that left, or the next number.
        """
        if replica == len(self._entries):
            self._entries.append(_Entry(ReplicaState.LEFT, incarnation=-1))
        entry = self._expect(replica, ReplicaState.LEFT)
        entry.incarnation, entry.failures, entry.why = entry.incarnation + 1, 0, ""
        self.joined += 1
        self._move(replica, ReplicaState.STALE)
        return entry.incarnation

    def proven(self, replica: int, incarnation: int) -> bool:
        """Note that an incarnation has proven a new version. Return False if this is old news."""
        entry = self._entries[replica]
        if entry.incarnation != incarnation or entry.state not in PRESENT:
            return False
        if entry.state is ReplicaState.LIVE:
            entry.failures = 0  # It has served the version before.
        else:
            self._move(replica, ReplicaState.LIVE)
        return True

    # -- inspection

    def state(self, replica: int) -> ReplicaState:
        return self._entries[replica].state

    def incarnation(self, replica: int) -> int:
        return self._entries[replica].incarnation

    def ids(self, *states: ReplicaState) -> list[int]:
        """Return the replicas in one of `states`."""
        return [i for i, entry in enumerate(self._entries) if entry.state in states]

    @property
    def live(self) -> list[int]:
        return self.ids(ReplicaState.LIVE)

    @property
    def present(self) -> dict[int, int]:
        """Return the replicas with a running worker, with their incarnations."""
        return {i: self._entries[i].incarnation for i in self.ids(*PRESENT)}

    @property
    def members(self) -> list[int]:
        """Return the replicas that serve, start or start again."""
        return self.ids(ReplicaState.LIVE, ReplicaState.STALE, ReplicaState.LOST)

    @property
    def starved(self) -> bool:
        """Whether a sync must come before any replica serves."""
        return not self.live and bool(self.ids(ReplicaState.STALE))

    @property
    def over(self) -> bool:
        """Whether every replica is given up."""
        gone = self.ids(ReplicaState.RETIRED, ReplicaState.LEFT)
        return bool(self._entries) and len(gone) == len(self._entries)

    def backoff_s(self, replica: int) -> float:
        """Return the seconds to wait before the next start: 1, 2, 4 and so on."""
        return float(min(2.0 ** max(0, self._entries[replica].failures - 1), _LONGEST_S))

    def describe(self) -> str:
        """Return one line on the replicas that do not serve, and why."""
        return "; ".join(
            f"rollout-{i} is {entry.state}" + (f": {entry.why}" if entry.why else "")
            for i, entry in enumerate(self._entries)
            if entry.state is not ReplicaState.LIVE
        )

    @contextmanager
    def subscribe(self, listener: Listener) -> Iterator[None]:
        """Tell `listener` every change while the body runs."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    # -- waits

    def check(self) -> None:
        """Raise ReplicaLost if every replica is given up, unless the run saves first."""
        if self.over and not self.saves:
            raise ReplicaLost(f"no replica is left: {self.describe()}")

    async def wait(
        self, who: str, ready: Callable[[], bool], deadline_s: float, whom: str = f"{RESTART}*"
    ) -> None:
        """Do what `until` does, registered as a wait for `whom`.

        Raises DeadlineError after `deadline_s` seconds, and a few more, in which the roster did not
        change, and nobody renewed the wait.
        """
        loop = asyncio.get_running_loop()

        def renewed(change: Change | None = None) -> None:
            if not limit.expired():
                limit.reschedule(loop.time() + deadline_s + GRACE_S)

        try:
            async with asyncio.timeout(deadline_s + GRACE_S) as limit:
                with (
                    self.subscribe(renewed),
                    self.extended_wait(renewed),
                    waiting(whom, "a replica"),
                ):
                    await self.until(ready)
        except TimeoutError:
            raise DeadlineError(
                f"{who} waited {deadline_s:g} s for a replica. {self.describe()} "
                "(trainer.wait_deadline_s)"
            ) from None

    async def until(self, ready: Callable[[], bool]) -> None:
        """Return once `ready()`, which is evaluated after each change. Raises what it raises."""
        changed = asyncio.Event()
        self._waits.append(changed)
        try:
            while not ready():
                changed.clear()
                await changed.wait()
        finally:
            self._waits.remove(changed)

    def wake_waits(self) -> bool:
        """Let all waits evaluate whether they are over. Return whether there are any."""
        for changed in self._waits:
            changed.set()
        return bool(self._waits)

    @contextmanager
    def extended_wait(self, renewed: Callable[[], None]) -> Iterator[None]:
        """Call `renewed` at each `extend_waits` while the body waits for a replica or a sync."""
        self._renewed.append(renewed)
        try:
            yield
        finally:
            self._renewed.remove(renewed)

    def extend_waits(self) -> None:
        """Renew the deadlines of all these waits, because the trainer makes progress."""
        for renewed in [*self._renewed]:
            renewed()

    def _fail(self, replica: int, why: str) -> None:
        entry = self._entries[replica]
        entry.why, entry.failures = why.partition("\n")[0], entry.failures + 1
        over = entry.failures > self.max_restarts
        self._move(replica, ReplicaState.RETIRED if over else ReplicaState.LOST)

    def _move(self, replica: int, to: ReplicaState) -> None:
        self._entries[replica].state = to
        why = "" if to in PRESENT else self._entries[replica].why
        for listener in [*self._listeners]:
            listener(Change(replica, to, why))
        self.wake_waits()

    def _expect(self, replica: int, expected: ReplicaState) -> _Entry:
        entry = self._entries[replica]
        if entry.state is not expected:
            raise ValueError(f"rollout-{replica} is {entry.state}, expected {expected}")
        return entry
