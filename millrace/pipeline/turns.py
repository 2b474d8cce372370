"""Turns on the devices. On shared devices the two sides alternate; on separate ones neither waits.

    waits for  rollouts to pause; either side to free memory or to allocate it again
    produces   the trainer's turn, which begins with `enter` and ends with `leave`

Shared memory passes from one side to the other in this order:

    enter      the replicas free their memory; the train engine allocates its own
    wake_rollout_weights  the replicas allocate memory for the weights of a sync
    leave      the train engine frees its memory; the replicas allocate all of theirs
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    nullcontext,
)

from millrace.observe.stopwatch import Timer, no_timer
from millrace.observe.watch import UNWATCHED, Watch
from millrace.ports import ReplicaSleeper, Sleeper, TransferReport, WeightSync
from millrace.types import PolicyVersion

Pause = Callable[[], AbstractAsyncContextManager[float | None]]
"""Pauses rollouts while its body runs. The body gets the time at which the pause began."""


class DeviceSharing:
    """The turns on separate devices, where each side keeps its own memory."""

    async def enter(self, *, keep_weights: bool = False) -> None:
        """Begin the trainer's turn. Without `keep_weights` a sync must come before `leave`."""

    async def wake_rollout_weights(self, part: Timer = no_timer) -> None:
        """Let the replicas receive a sync during the trainer's turn."""

    async def leave(self) -> None:
        """End the trainer's turn."""

    async def run_while_asleep(self, build: Awaitable[object]) -> None:
        """Let the replicas start with all memory, during the trainer's turn."""
        await build

    @asynccontextmanager
    async def trainer_turn(
        self, part: Timer = no_timer, *, keep_weights: bool = False
    ) -> AsyncIterator[None]:
        """Give the body the trainer's turn. After a failure the trainer keeps the devices."""
        yield

    @asynccontextmanager
    async def window(
        self, pause: Pause, part: Timer, *, keep_weights: bool = False
    ) -> AsyncIterator[None]:
        """Give the body a turn for the steps and the sync of a window.

        On shared devices rollouts pause for all of it. With `keep_weights` no sync needs to come.
        """
        yield

    def activation(self, pause: Pause) -> AbstractAsyncContextManager[float | None]:
        """Pause rollouts while a new version becomes live."""
        return pause()


class SharedDevices(DeviceSharing):
    """The turns on shared devices. Memory changes sides at both ends of the trainer's turn."""

    def __init__(self, pool: ReplicaSleeper, engine: Sleeper) -> None:
        self._pool = pool
        self._engine = engine

    async def enter(self, *, keep_weights: bool = False) -> None:
        await self._pool.sleep(keep_weights)
        await self._engine.wake()

    async def wake_rollout_weights(self, part: Timer = no_timer) -> None:
        with part("switch"):
            await self._pool.wake_weights()

    async def leave(self) -> None:
        await self._engine.sleep()
        await self._pool.wake()

    async def run_while_asleep(self, build: Awaitable[object]) -> None:
        await self._engine.sleep()
        await build
        await self.enter()

    @asynccontextmanager
    async def trainer_turn(
        self, part: Timer = no_timer, *, keep_weights: bool = False
    ) -> AsyncIterator[None]:
        with part("switch"):
            await self.enter(keep_weights=keep_weights)
        yield
        with part("switch"):
            await self.leave()

    @asynccontextmanager
    async def window(
        self, pause: Pause, part: Timer, *, keep_weights: bool = False
    ) -> AsyncIterator[None]:
        async with pause(), self.trainer_turn(part, keep_weights=keep_weights):
            yield

    def activation(self, pause: Pause) -> AbstractAsyncContextManager[float | None]:
        """Return a null context: rollouts are paused since the start of the turn."""
        return nullcontext(None)


def turns_of(shared: bool, pool: ReplicaSleeper, engine: Sleeper) -> DeviceSharing:
    """Return the turns for shared or separate devices."""
    return SharedDevices(pool, engine) if shared else DeviceSharing()


class Publisher:
    """Sends versions to the replicas in the trainer's turn, and makes them live.

    `watch` sees each step as a span on the track `sync`, whose key is the version.
    """

    def __init__(self, turns: DeviceSharing, sync: WeightSync, watch: Watch = UNWATCHED) -> None:
        self._turns, self._sync, self._watch = turns, sync, watch

    async def keep(self, version: PolicyVersion, part: Timer = no_timer) -> None:
        with part("sync_keep"), self._watch.span("sync", "keep", str(version)):
            await self._sync.keep(version)

    async def transfer(self, version: PolicyVersion, part: Timer = no_timer) -> TransferReport:
        await self._turns.wake_rollout_weights(part)
        with part("sync_transfer"), self._watch.span("sync", "transfer", str(version)) as facts:
            report = await self._sync.transfer(version)
            facts["bytes"] = report.bytes
        return report

    async def activate(self, version: PolicyVersion, part: Timer = no_timer) -> float:
        """Make a sent version live. Return the longest pause of a replica in seconds."""
        with part("sync_activate"), self._watch.span("sync", "activate", str(version)) as facts:
            facts["pause_s"] = pause_s = await self._sync.activate(version)
        return pause_s
