"""The ranks of the trainer on the driver's side, and their recovery.

If one rank is lost, all of them are ended and started anew. The new ones load the newest whole
checkpoint and train the steps since then again. During a recovery, callers wait.
Failed calls are repeated, so both loops see one slow call.

waits for  the end of the old ranks; the trainer's turn on shared devices; the start of the new ones
produces   new peers in the same list, and the next incarnation
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from millrace.errors import (
    DeadlineError,
    MillraceError,
    NoAnswer,
    NotRestorable,
    SyncError,
    WorkerError,
)
from millrace.ports import TrainEngine
from millrace.runtime.remote import RemoteTrainEngine, all_of
from millrace.runtime.rpc import Peer
from millrace.types import PolicyVersion
from millrace.waits.registry import as_actor, doing, waiting

T = TypeVar("T")
RECOVERY = "recovery of the trainer"
"""The name of the actor that starts lost ranks anew."""
_STOPPED = (
    "The run was stopped before its trainer was back. Nothing is lost: trainer.resume=auto goes on "
    "from the newest checkpoint and the journal"
)


class RankLauncher(Protocol):
    """Starts and ends the workers of the ranks."""

    async def start_ranks(self, started: Callable[[Peer], None]) -> list[Peer]:
        """Start all ranks with their engine and their senders.

        Call `started` as soon as a worker answers.
        """
        ...

    async def end(self, peer: Peer) -> None:
        """End a worker at once, with all processes that it started."""
        ...

    async def meet(self, replica: int, peer: Peer) -> None:
        """Tell a replica where it meets the present ranks, unless it knows."""
        ...


class StepReplayer(Protocol):
    """Replays the steps that the trainer made since its checkpoints."""

    async def replay(
        self,
        engine: TrainEngine,
        kept: PolicyVersion | None,
        keep: Callable[[PolicyVersion], Awaitable[object]],
    ) -> tuple[PolicyVersion, int]:
        """Bring a new engine to the state of the lost one.

        Call `keep` where the weights are those of the version `kept`. Return the version of the
        checkpoint, and the number of steps since then. Raises NotRestorable.
        """
        ...


class TrainerGroup:
    """The peers of all ranks, of whichever incarnation."""

    def __init__(self, peers: list[Peer], starter: RankLauncher, *, max_restarts: int) -> None:
        self.peers = peers
        """All who call the ranks share this list."""
        self.starter = starter
        self.incarnation = 0
        self.losses = self.restarts = self.replayed = 0
        """Losses, restarts, and steps that were trained again."""
        self.seconds: list[float] = []
        """The time of each recovery since the last row."""
        self.starting: list[Peer] = []
        """Workers that do not take part yet."""
        self.kept: Callable[[], PolicyVersion | None] = lambda: None
        """Returns the kept version that is not live yet."""
        self.note: Callable[[str], None] = lambda text: None
        self.moved: Callable[[], None] = lambda: None
        """Called at each call of a rank, at each start of the ranks, and once they are back."""
        for peer in peers:
            self._extend_waits_on_call(peer)
        self._max_restarts = max_restarts
        self._failures = 0
        """Losses and failed starts, since a checkpoint was written."""
        self._past: StepReplayer | None = None
        self._launch: Callable[[Coroutine[None, None, None], str], asyncio.Task[None]] | None = None
        self._task: asyncio.Task[None] | None = None
        self._error: MillraceError | None = None
        """Why a recovery failed."""
        self._out_of_grace = False
        """Whether the run was stopped, and has no time for a recovery."""
        self._end_of_grace: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        """Whether the processes of the lost ranks are gone."""
        self._room = asyncio.Event()
        """Whether the trainer may use the devices."""
        self._room.set()

    # -- the scope of recoveries

    @contextmanager
    def recalled(self, past: StepReplayer) -> Iterator[None]:
        """Recover lost ranks from `past` while the body runs."""
        if self._max_restarts:
            self._past = past
        try:
            yield
        finally:
            self._past, self._out_of_grace = None, False
            if self._end_of_grace is not None:
                self._end_of_grace.cancel()
                self._end_of_grace = None

    def follow(
        self, launch: Callable[[Coroutine[None, None, None], str], asyncio.Task[None]] | None
    ) -> None:
        """Begin recoveries with `launch`, as soon as a rank is lost. None ends it."""
        self._launch = launch
        for peer in self.peers:
            peer.on_death = self._died if launch else lambda why: None

    def _died(self, why: str) -> None:
        self.begin()

    def _extend_waits_on_call(self, peer: Peer) -> None:
        """Call `moved` when a call of a rank begins, so that waits for replicas are longer."""
        peer.on_call = lambda: self.moved()

    @property
    def death(self) -> str:
        """Return why a rank is dead, or nothing."""
        return next((p.death for p in self.peers if p.death), "")

    @property
    def able(self) -> bool:
        """Whether lost ranks are started anew now."""
        return self._past is not None and self._launch is not None

    # -- calls

    async def call_with_recovery(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call, and make it again after each recovery."""
        while True:
            await self.ready()
            incarnation = self.incarnation
            try:
                return await call()
            except (WorkerError, SyncError, DeadlineError) as error:
                if isinstance(error, NoAnswer) and self.able:
                    self.lose(str(error))
                if not await self.gone(incarnation):
                    raise

    def lose(self, why: str) -> None:
        """Take all ranks for dead."""
        for peer in self.peers:
            peer.mark_dead(why)

    async def gone(self, incarnation: int) -> bool:
        """Return whether the ranks of an incarnation are lost. Others have their place then.

        Raises WorkerError if there are none.
        """
        if not self.able or (self.incarnation == incarnation and not self.death):
            return False
        await self.ready()
        return True

    async def ready(self) -> None:
        """Wait until no recovery is under way. Raises the error of one that failed."""
        while True:
            if self._error is not None:
                raise self._error
            self.begin()
            if self._task is None:
                return
            with waiting(RECOVERY, "its end"):
                await asyncio.wait([self._task])

    def stop(self, grace_s: float) -> None:
        """End a recovery that takes longer than `grace_s` from now, because the run stops.

        The first request counts.
        """
        if self._past is None or self._end_of_grace is not None:
            return

        def end() -> None:
            self._out_of_grace = True
            if self._task is not None:
                self._task.cancel()

        self._end_of_grace = asyncio.get_running_loop().call_later(grace_s, end)

    def saved(self) -> None:
        """Note that a checkpoint is written. Restarts are counted anew."""
        self._failures = 0

    # -- shared devices

    def take_room(self) -> None:
        """Let new ranks use the devices."""
        self._room.set()

    async def give_room(self, sleep: Callable[[], Awaitable[object]]) -> None:
        """Free the devices: put the ranks to sleep. Those that are lost end instead."""
        await self.ready()
        self._room.clear()
        try:
            await sleep()
        except (WorkerError, DeadlineError):
            self.begin()
            if self._task is None:
                raise
            with waiting(RECOVERY, "the end of the lost ranks"):
                await self._ended.wait()

    # -- the recovery

    def begin(self) -> None:
        """Begin a recovery if a rank is lost, and none is under way."""
        if self._task or self._error or self._past is None or not self._launch or not self.death:
            return
        self._ended.clear()
        work = as_actor(RECOVERY, self._recover(self._past))
        self._task = self._launch(work, "recovery")

    async def _recover(self, past: StepReplayer) -> None:
        why = self.death
        try:
            if self._out_of_grace:
                raise asyncio.CancelledError
            await self._bring_back(past)
        except MillraceError as error:
            self._error = error  # Whoever calls the ranks next raises it.
        except asyncio.CancelledError:
            self._error = WorkerError(f"{why}\n{_STOPPED}")
            if not self._out_of_grace:
                raise  # The run is over.
        finally:
            self._task = None
            self._ended.set()

    async def _bring_back(self, past: StepReplayer) -> None:
        clock = asyncio.get_running_loop().time
        since, why, lost = clock(), self.death, [*self.peers]
        self.losses += 1
        while True:
            self._failures += 1
            if self._failures > self._max_restarts:
                raise WorkerError(why)
            self.moved()
            pause_s = 2.0 ** (self._failures - 1)
            self.note(f"the trainer was lost: {_line(why)}; restart in {pause_s:g} s")
            await self._end(lost, why)
            with doing("the pause before the next start"):
                await asyncio.sleep(pause_s)
            with waiting("trainer", "the trainer's turn on the devices"):
                await self._room.wait()
            try:
                version, steps = await self._restore(past)
            except NotRestorable as error:
                await self._end(self.starting, str(error))
                raise WorkerError(f"{why}\nIt is not started anew: {error}") from error
            except (MillraceError, OSError) as error:
                why, lost = str(error), [*self.starting]
                continue
            break
        self.peers[:], self.starting = self.starting, []
        self.incarnation += 1
        self.restarts += 1
        self.replayed += steps
        self.seconds.append(clock() - since)
        self.follow(self._launch)
        self.moved()
        self.note(
            f"the trainer is back after {clock() - since:.1f} s: version {version}, and {steps} "
            "steps since then again"
        )

    async def _end(self, peers: list[Peer], why: str) -> None:
        """End workers. No message of them has an effect from now on."""
        for peer in peers:
            peer.mark_dead(why)
        with doing("the end of the lost ranks"):
            await asyncio.gather(*(self.starter.end(peer) for peer in peers))
        self._ended.set()

    async def _restore(self, past: StepReplayer) -> tuple[PolicyVersion, int]:
        """Start new ranks, and bring them to the state of the lost ones."""

        def started(peer: Peer) -> None:
            self._extend_waits_on_call(peer)
            self.starting.append(peer)

        self.starting = []
        with doing("the start of the ranks"):
            self.starting = peers = await self.starter.start_ranks(started)
        with doing("the state of the checkpoint, and the steps since then"):
            return await past.replay(
                RemoteTrainEngine(peers),
                self.kept(),
                lambda version: all_of(peers, "sender.keep", (version,)),
            )


def _line(why: str) -> str:
    return why.partition("\n")[0]
