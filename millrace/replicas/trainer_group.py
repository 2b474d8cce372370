"""The trainer on the driver's side: calls of all ranks, and the recovery of lost ones.

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
from pathlib import Path
from typing import Any, Protocol

from millrace import codec
from millrace.errors import (
    DeadlineError,
    MillraceError,
    NoAnswer,
    NotFinite,
    NotRestorable,
    SaveLost,
    SyncError,
    WorkerError,
)
from millrace.ports import Phase, StepReport, TrainBatch, TrainEngine
from millrace.process.rpc import Limit, Peer, all_of
from millrace.types import PolicyVersion, Sample, Tokens
from millrace.waits.registry import as_actor, doing, waiting

Launch = Callable[[Coroutine[None, None, None], str], asyncio.Task[None]]
"""Begins a task by its name."""
RECOVERY = "recovery of the trainer"
"""The name of the actor that starts lost ranks anew."""
_STOPPED = (
    "The run was stopped before its trainer was back. Nothing is lost: trainer.resume=auto goes on "
    "from the newest checkpoint and the journal"
)


class WorkerLauncher(Protocol):
    """Starts and ends the workers of both sides."""

    async def start(self, replica: int, started: Callable[[Peer], None]) -> Peer:
        """Start the worker of a replica and build its engine.

        Call `started` as soon as the worker answers.
        """
        ...

    async def start_ranks(self, started: Callable[[Peer], None]) -> list[Peer]:
        """Start all ranks of the trainer with their engine and their senders."""
        ...

    async def meet(self, replica: int, peer: Peer) -> None:
        """Tell a replica where it meets the present ranks, unless it knows."""
        ...

    async def end(self, peer: Peer) -> None:
        """End a worker at once, with all processes that it started."""
        ...

    def release(self, replica: int) -> None:
        """Give back the devices of a replica whose worker has ended for good."""
        ...

    async def limit(self) -> Limit:
        """Return how many replicas find devices now, with those that run."""
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
    """A TrainEngine and a Sleeper on all ranks. A call that a lost rank breaks is made again.

    An error that the engine itself raises is not a loss. It ends the call as in any engine.
    """

    def __init__(
        self,
        peers: list[Peer],
        starter: WorkerLauncher,
        *,
        max_restarts: int,
        folder: Path | None = None,
        note: Callable[[str], None] = lambda text: None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """A batch that cannot be trained is saved in `folder`, the run's.

        `moved` is called at each call of a rank, at each start of the ranks, and once they are
        back: waits for replicas are longer then.
        """
        self.peers = peers
        """All who call the ranks share this list."""
        self.starter, self.note, self._moved = starter, note, moved
        self.incarnation = 0
        self.losses = self.restarts = self.replayed = 0
        """Losses, restarts, and steps that were trained again."""
        self.seconds: list[float] = []
        """The time of each recovery since the last row."""
        self.starting: list[Peer] = []
        """Workers that do not take part yet."""
        self.kept: PolicyVersion | None = None
        """The version that the ranks keep for a sync, and that is not live yet."""
        for peer in peers:
            peer.on_call = moved
        self._folder, self._max_restarts = folder, max_restarts
        self._failures = 0
        """Losses and failed starts, since a checkpoint was written."""
        self._staged: int | None = None
        """The incarnation that writes a staged save."""
        self._past: StepReplayer | None = None
        self._launch: Launch | None = None
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

    # -- the engine

    async def step(self, batch: TrainBatch) -> StepReport:
        """Train on `batch`. If the run ends because nothing is finite, the batch is saved."""
        try:
            return (await self._all("step", (batch,), StepReport))[0]
        except NotFinite as error:
            if self._folder is None:
                raise
            raise NotFinite(f"{error}. {_saved(batch, self._folder)}") from error

    async def sft_step(self, examples: list[tuple[Tokens, ...]]) -> StepReport:
        return (await self._all("sft_step", (examples,), StepReport))[0]

    async def begin(self, phase: Phase, horizon: int) -> None:
        await self._all("begin", (phase, horizon))

    async def matmul_rates(self) -> list[float]:
        """Return each rank's multiplications and additions per second, in a large matmul."""
        return await all_of(self.peers, "matmul_rate", (), float)

    async def peak_memory(self) -> list[int]:
        """Return each rank's peak memory so far, in bytes."""
        return await all_of(self.peers, "peak_memory", (), int)

    async def log_probs(self, samples: tuple[Sample, ...]) -> list[list[float]]:
        return (await self._all("log_probs", (samples,), list[list[float]]))[0]

    async def reference_log_probs(
        self, samples: tuple[Sample, ...], seconds: float, eight_bit: bool = False
    ) -> list[list[list[float]]]:
        result, arguments = list[list[list[float]]], (samples, seconds, eight_bit)
        return (await self._all("reference_log_probs", arguments, result))[0]

    async def displace(self, away: bool) -> None:
        await self._all("displace", (away,))

    # A worker may have another working directory, so it gets absolute paths.

    async def load(self, folder: str) -> None:
        await self._all("load", (str(Path(folder).resolve()),))

    async def export(self, folder: str) -> None:
        await self._all("export", (str(Path(folder).resolve()),))

    async def save(self, folder: str, staged: bool = False) -> None:
        """Save. Restarts are counted anew once the checkpoint is written."""
        self._staged = None
        await self._all("save", (str(Path(folder).resolve()), staged))
        if staged:
            self._staged = self.incarnation
        else:
            self._failures = 0

    async def saved(self) -> None:
        """Wait for a staged save. A rank replies between two steps, because a step blocks it.

        Raises SaveLost if its ranks are lost: their copy is gone.
        """
        staged, self._staged = self._staged, None
        if staged is None:
            return
        try:
            if staged == self.incarnation:
                await all_of(self.peers, "engine.saved")
                self._failures = 0
                return
        except (WorkerError, DeadlineError):
            if not self.able or (staged == self.incarnation and not self.death):
                raise
        raise SaveLost("a rank of the trainer was lost before the checkpoint was written")

    async def sleep(self) -> None:
        """Free the devices: put the ranks to sleep. Those that are lost end instead."""
        await self.ready()
        self._room.clear()
        try:
            await all_of(self.peers, "engine.sleep")
        except (WorkerError, DeadlineError):
            self.begin_recovery()
            if self._task is None:
                raise
            with waiting(RECOVERY, "the end of the lost ranks"):
                await self._ended.wait()

    async def wake(self) -> None:
        self._room.set()
        await self._all("wake")

    async def close(self) -> None:
        await self._all("close")

    async def _all(
        self, method: str, args: tuple[object, ...] = (), result: object = None
    ) -> list[Any]:
        """Call all ranks, and call them once more after each recovery."""
        while True:
            await self.ready()
            incarnation = self.incarnation
            try:
                return await all_of(self.peers, f"engine.{method}", args, result)
            except (WorkerError, SyncError, DeadlineError) as error:
                if isinstance(error, NoAnswer) and self.able:
                    self.lose(str(error))
                if not await self.gone(incarnation):
                    raise

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

    def follow(self, launch: Launch | None) -> None:
        """Begin recoveries with `launch`, as soon as a rank is lost. None ends it."""
        self._launch = launch
        for peer in self.peers:
            peer.on_death = lambda why: self.begin_recovery()

    @property
    def death(self) -> str:
        """Return why a rank is dead, or nothing."""
        return next((p.death for p in self.peers if p.death), "")

    @property
    def able(self) -> bool:
        """Whether lost ranks are started anew now."""
        return self._past is not None and self._launch is not None

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
            self.begin_recovery()
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

    # -- the recovery

    def begin_recovery(self) -> None:
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

        def started(peer: Peer) -> None:
            peer.on_call = self._moved
            self.starting.append(peer)

        def keep(version: PolicyVersion) -> Awaitable[object]:
            return all_of(self.starting, "sender.keep", (version,))

        self.losses += 1
        while True:
            self._failures += 1
            if self._failures > self._max_restarts:
                raise WorkerError(why)
            self._moved()
            pause_s = 2.0 ** (self._failures - 1)
            cause, *_ = why.splitlines() or [why]
            self.note(f"the trainer was lost: {cause}; restart in {pause_s:g} s")
            await self._end(lost, why)
            with doing("the pause before the next start"):
                await asyncio.sleep(pause_s)
            with waiting("trainer", "the trainer's turn on the devices"):
                await self._room.wait()
            try:
                self.starting = []
                with doing("the start of the ranks"):
                    self.starting = peers = await self.starter.start_ranks(started)
                engine = TrainerGroup(peers, self.starter, max_restarts=0, moved=self._moved)
                with doing("the state of the checkpoint, and the steps since then"):
                    version, steps = await past.replay(engine, self.kept, keep)
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
        self._moved()
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


def _saved(batch: TrainBatch, folder: Path) -> str:
    """Save a batch as JSON. Return the place, or why it could not be saved."""
    path = folder / f"nonfinite-{batch.version:06d}.json"
    try:
        path.write_bytes(codec.to_json(batch))
    except (OSError, TypeError) as error:
        return f"The batch could not be saved: {error}"
    return f"The last batch is in {path}"
