"""The Trainer: takes ready samples, steps the train engine, syncs weights.

    consumes  READY samples of the ledger
    waits for the next local step's samples; rollouts to hold still; a validation that still runs; a checkpoint that is still written
    produces  policy versions; a metrics row, and where due a checkpoint and a validation, for each

One loop for every mode. The Schedule decides how many samples it takes, when it syncs and for how long rollouts are held.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from millrace.observe.metrics import VersionMetrics
from millrace.observe.stopwatch import Stopwatch
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.sample_queue import SampleQueue
from millrace.ports import RolloutStats, StepReport, TrainBatch, TrainEngine, TransferReport, WeightSync
from millrace.schedule.ledger import LedgerSnapshot
from millrace.types import PolicyVersion, Sample


class Observer(Protocol):
    """Everything that follows from a version and is none of the loop's business: rows, history, checkpoints, validation."""

    def published(self, version: PolicyVersion, trained: list[int], snapshot: LedgerSnapshot) -> None:
        """`version` is live and retired `trained`. Called with nothing TAKEN or TRAINED; must be durable on return."""
        ...

    def stepped(self, samples: list[Sample], report: StepReport) -> None:
        """One local step is done."""
        ...

    def row(self, version: PolicyVersion, row: dict[str, float]) -> None: ...

    def checkpoint_due(self, version: PolicyVersion) -> bool: ...

    async def checkpoint(self, snapshot: LedgerSnapshot, *, last: bool = False) -> None:
        """Save this cut: on return training may go on, though it may not be whole yet. The `last` one is."""
        ...

    async def validated(self) -> None:
        """Until no validation runs: it is on the weights that are live now."""
        ...

    def validate(self, version: PolicyVersion) -> None:
        """Start a validation on the live weights, if one is due."""
        ...


class Trainer:
    """The training side of the pipeline."""

    def __init__(
        self,
        queue: SampleQueue,
        rollouter: Rollouter,
        engine: TrainEngine,
        sync: WeightSync,
        observer: Observer,
        watch: Stopwatch,
    ) -> None:
        self.queue = queue
        self.rollouter = rollouter
        self.engine = engine
        self.sync = sync
        self.observer = observer
        self.watch = watch
        self._metrics = VersionMetrics()
        self._stats = RolloutStats()
        self._waited_s = 0.0

    async def begin(self) -> None:
        """Bring the start weights to every replica: first load from the trainer, not from disk. Colocated devices are its own until then."""
        version, colocated = self.queue.ledger.version, self.queue.ledger.schedule.colocated
        if colocated:
            await self.rollouter.pool.wake_weights()
        await self.sync.transfer(version)
        await self.sync.activate(version)
        if colocated:
            await self.engine.sleep()
            await self.rollouter.pool.wake()
        self._stats = await self.rollouter.pool.stats()

    async def run(self) -> None:
        """Until every sample of the run is trained and live, or the run is told to stop."""
        ledger = self.queue.ledger
        self._stats = await self.rollouter.pool.stats()  # a validation of the start weights is none of the first version's
        self.watch.flush()
        while not ledger.done():
            await self._wait_for_samples(lambda: self.queue.stopping)
            if self.queue.stopping:
                return
            async with self._turn():
                await self._window()
            self.observer.validate(ledger.version)

    async def stop(self) -> None:
        """Save the state of a run that is done or was told to stop: nothing is TAKEN or TRAINED."""
        ledger = self.queue.ledger
        async with self.rollouter.parked("trainer"):
            if ledger.schedule.colocated:
                await self.rollouter.pool.sleep()
                await self.engine.wake()
            await self.observer.checkpoint(ledger.snapshot(), last=True)
            if ledger.schedule.colocated:
                await self.engine.sleep()
                await self.rollouter.pool.wake()

    async def _wait_for_samples(self, or_else: Callable[[], bool]) -> None:
        clock = asyncio.get_running_loop().time
        start = clock()
        with self.watch.part("wait_samples"):
            takeable = self.queue.ledger.takeable
            await self.queue.wait("trainer", "the samples of its next step", lambda: bool(takeable()) or or_else())
        self._waited_s += clock() - start

    async def _window(self) -> None:
        """Local steps until a sync is due, then the sync."""
        ledger, queue = self.queue.ledger, self.queue
        while not ledger.sync_due():
            await self._wait_for_samples(lambda: queue.out_of_grace)
            if not ledger.takeable():
                break  # told to stop, and the rest of the window takes too long: sync what there is
            samples = queue.do(ledger.take)
            self._metrics.waited(self._waited_s, samples, ledger.version)
            self._waited_s = 0.0
            with self.watch.part("step"):
                report = await self.engine.step(TrainBatch(tuple(samples), ledger.version))
            queue.do(ledger.trained)
            self._metrics.stepped(samples, ledger.version, report)
            self.observer.stepped(samples, report)
        await self._publish()

    async def _publish(self) -> None:
        """Make the next version live, flush its row, and cut a checkpoint if one is due.

        The row comes first: a run that goes on from the checkpoint has it. So the seconds that a checkpoint and the change
        of hands after it take are the next version's.
        """
        ledger = self.queue.ledger
        version = ledger.version + 1
        if ledger.schedule.colocated:
            with self.watch.part("switch"):
                await self.rollouter.pool.wake_weights()
        with self.watch.part("sync_transfer"):
            transfer = await self.sync.transfer(version)
        async with self._hold(not ledger.schedule.colocated):
            with self.watch.part("sync_activate"):
                pause_s = await self.sync.activate(version)
            trained = self.queue.do(ledger.published)
            # The cut: nothing is TAKEN or TRAINED, and the weights are this version's until the next step.
            snapshot = ledger.snapshot()
            self.observer.published(version, trained, snapshot)
        await self._flush_row(version, transfer, pause_s)
        if self.observer.checkpoint_due(version):
            with self.watch.part("save_checkpoint"):
                await self.observer.checkpoint(snapshot)

    async def _flush_row(self, version: PolicyVersion, transfer: TransferReport, pause_s: float) -> None:
        """Figures of the version's own steps, and no others."""
        ledger = self.queue.ledger
        stats = await self.rollouter.pool.stats()
        metrics, self._metrics = self._metrics, VersionMetrics()
        row = metrics.row(
            timing=self.watch.flush(),
            before=self._stats,
            after=stats,
            usable_slots=ledger.schedule.capacity * self.rollouter.roller.num_responses,
            transfer=transfer,
            pause_s=pause_s,
        )
        self._stats = stats
        self.observer.row(version, row | self.rollouter.row(version - 1))

    @asynccontextmanager
    async def _hold(self, needed: bool) -> AsyncIterator[None]:
        """Rollouts held still while the body runs, if needed. A validation on the live weights ends first."""
        async with AsyncExitStack() as stack:
            if needed:
                with self.watch.part("wait_validation"):
                    await self.observer.validated()
                with self.watch.part("wait_rollouts"):
                    await stack.enter_async_context(self.rollouter.held_still("trainer"))
            yield

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """In colocated placement the devices are the trainer's for a whole window."""
        if not self.queue.ledger.schedule.colocated:
            yield
            return
        async with self._hold(True):
            with self.watch.part("switch"):
                await self.rollouter.pool.sleep(False)
                await self.engine.wake()
            yield
            with self.watch.part("switch"):
                await self.engine.sleep()
                await self.rollouter.pool.wake()
