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

from millrace.ports import ReplicaSleeper, Sleeper, TransferReport, WeightSync
from millrace.types import PolicyVersion
from millrace.waits.registry import part, span

Pause = Callable[[], AbstractAsyncContextManager[object]]
"""Pauses rollouts while its body runs."""


class DeviceSharing:
    """The turns on separate devices, where each side keeps its own memory."""

    async def enter(self, *, keep_weights: bool = False) -> None:
        """Begin the trainer's turn. Without `keep_weights` a sync must come before `leave`."""

    async def wake_rollout_weights(self) -> None:
        """Let the replicas receive a sync during the trainer's turn."""

    async def leave(self) -> None:
        """End the trainer's turn."""

    async def run_while_asleep(self, build: Awaitable[object]) -> None:
        """Let the replicas start with all memory, during the trainer's turn."""
        await build

    @asynccontextmanager
    async def trainer_turn(self, *, keep_weights: bool = False) -> AsyncIterator[None]:
        """Give the body the trainer's turn. After a failure the trainer keeps the devices."""
        yield

    @asynccontextmanager
    async def window(self, pause: Pause, *, keep_weights: bool = False) -> AsyncIterator[None]:
        """Give the body a turn for the steps and the sync of a window.

        On shared devices rollouts pause for all of it. With `keep_weights` no sync needs to come.
        """
        yield

    def activation(self, pause: Pause) -> AbstractAsyncContextManager[object]:
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

    async def wake_rollout_weights(self) -> None:
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
    async def trainer_turn(self, *, keep_weights: bool = False) -> AsyncIterator[None]:
        with part("switch"):
            await self.enter(keep_weights=keep_weights)
        yield
        with part("switch"):
            await self.leave()

    @asynccontextmanager
    async def window(self, pause: Pause, *, keep_weights: bool = False) -> AsyncIterator[None]:
        async with pause(), self.trainer_turn(keep_weights=keep_weights):
            yield

    def activation(self, pause: Pause) -> AbstractAsyncContextManager[object]:
        """Return a null context: rollouts are paused since the start of the turn."""
        return nullcontext(None)


def turns_of(shared: bool, pool: ReplicaSleeper, engine: Sleeper) -> DeviceSharing:
    """Return the turns for shared or separate devices."""
    return SharedDevices(pool, engine) if shared else DeviceSharing()


class Publisher:
    """Sends versions to the replicas in the trainer's turn, and makes them live.

    Each step is a span on the track `sync`, whose key is the version, and a part of its actor's time.
    """

    def __init__(self, turns: DeviceSharing, sync: WeightSync) -> None:
        self._turns, self._sync = turns, sync

    async def keep(self, version: PolicyVersion) -> None:
        with span("sync", "keep", str(version), part="sync_keep"):
            await self._sync.keep(version)

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        await self._turns.wake_rollout_weights()
        with span("sync", "transfer", str(version), part="sync_transfer") as sent:
            report = await self._sync.transfer(version)
            sent.facts.update(bytes=report.bytes, seconds=report.seconds)
        return report

    async def activate(self, version: PolicyVersion) -> float:
        """Make a sent version live. Return the longest pause of a replica in seconds."""
        with span("sync", "activate", str(version), part="sync_activate") as live:
            live.facts["pause_s"] = pause_s = await self._sync.activate(version)
        return pause_s
