"""Who has the devices: on shared devices the two sides take turns, on separate ones neither waits.

    waits for rollouts to stop, and for either side to give memory back or take it again
    produces  the trainer's turn: it begins with `enter` and ends with `leave`

Shared memory changes hands in one order:

    enter      the replicas let go; the train engine comes back
    make_room  the replicas take memory for the weights that a sync will bring
    leave      the train engine lets go; the replicas take all their memory again
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    nullcontext,
)

from millrace.observe.stopwatch import Parts, untimed
from millrace.ports import ReplicaSleeper, Sleeper

Hold = Callable[[], AbstractAsyncContextManager[float | None]]
"""Stops rollouts while its body runs, which gets the time since when they are stopped."""


class Turns:
    """Separate devices: each side has its own, and nothing changes hands."""

    async def enter(self, *, keep_weights: bool = False) -> None:
        """Begin the trainer's turn. Without `keep_weights` a sync must come before `leave`."""

    async def make_room(self, part: Parts = untimed) -> None:
        """Let the replicas receive a sync within the trainer's turn."""

    async def leave(self) -> None:
        """End the trainer's turn."""

    async def lend(self, build: Awaitable[object]) -> None:
        """Let the replicas start with all memory, in the trainer's turn."""
        await build

    @asynccontextmanager
    async def trainers(
        self, part: Parts = untimed, *, keep_weights: bool = False
    ) -> AsyncIterator[None]:
        """The trainer's turn. A failure leaves the devices where they are."""
        yield

    @asynccontextmanager
    async def window(self, hold: Hold, part: Parts) -> AsyncIterator[None]:
        """A turn for the steps and the sync of a window. Rollouts stop for all of it."""
        yield

    def activation(self, hold: Hold) -> AbstractAsyncContextManager[float | None]:
        """A new version becomes live. Rollouts stop for this alone."""
        return hold()


class SharedTurns(Turns):
    """Shared devices: memory changes hands at both ends of the trainer's turn."""

    def __init__(self, pool: ReplicaSleeper, engine: Sleeper) -> None:
        self._pool = pool
        self._engine = engine

    async def enter(self, *, keep_weights: bool = False) -> None:
        await self._pool.sleep(keep_weights)
        await self._engine.wake()

    async def make_room(self, part: Parts = untimed) -> None:
        with part("switch"):
            await self._pool.wake_weights()

    async def leave(self) -> None:
        await self._engine.sleep()
        await self._pool.wake()

    async def lend(self, build: Awaitable[object]) -> None:
        await self._engine.sleep()
        await build
        await self.enter()

    @asynccontextmanager
    async def trainers(
        self, part: Parts = untimed, *, keep_weights: bool = False
    ) -> AsyncIterator[None]:
        with part("switch"):
            await self.enter(keep_weights=keep_weights)
        yield
        with part("switch"):
            await self.leave()

    @asynccontextmanager
    async def window(self, hold: Hold, part: Parts) -> AsyncIterator[None]:
        async with hold(), self.trainers(part):
            yield

    def activation(self, hold: Hold) -> AbstractAsyncContextManager[float | None]:
        """Rollouts are stopped already, since the turn began."""
        return nullcontext(None)


def turns_of(shared: bool, pool: ReplicaSleeper, engine: Sleeper) -> Turns:
    """Return the turns of two sides that share their devices or not."""
    return SharedTurns(pool, engine) if shared else Turns()
