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
from functools import partial
from typing import Protocol

from millrace.observe.metrics import Synced, VersionMetrics
from millrace.observe.stopwatch import Parts, Stopwatch, untimed
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.turns import Turns
from millrace.ports import RolloutStats, StepReport, TrainBatch, TrainEngine, WeightSync
from millrace.schedule.ledger import LedgerSnapshot, Topic, Totals
from millrace.types import PolicyVersion, Sample


class Observer(Protocol):
    """Everything that follows from a version and is none of the loop's business: rows, history, checkpoints, validation."""

    def published(self, trained: list[int], totals: Totals) -> None:
        """A version is live and retired `trained`. Must be durable on return."""
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


MakeRow = Callable[..., dict[str, float]]
"""VersionMetrics.row, lacking the sync's figures."""


class Trainer:
    """The training side of the pipeline."""

    def __init__(
        self,
        queue: SampleQueue,
        rollouter: Rollouter,
        engine: TrainEngine,
        turns: Turns,
        sync: WeightSync,
        observer: Observer,
        watch: Stopwatch,
    ) -> None:
        self.queue = queue
        self.rollouter = rollouter
        self.engine = engine
        self.turns = turns
        self.sync = sync
        self.observer = observer
        self.watch = watch
        self._metrics = VersionMetrics()
        self._stats = RolloutStats()
        self._waited_s = 0.0
        self._tasks = asyncio.TaskGroup()
        self._arriving: asyncio.Task[None] | None = None
        """Of a version that is on its way while the next steps are trained."""

    async def begin(self) -> None:
        """Bring the start weights from the trainer to every replica.

        Until this returns, shared devices are the trainer's.
        """
        version = self.queue.ledger.version
        await self.turns.make_room()
        await self.sync.transfer(version)
        await self.sync.activate(version)
        await self.turns.leave()
        self._stats = await self.rollouter.pool.stats()

    async def run(self) -> None:
        """Until every sample of the run is trained and live, or the run is told to stop."""
        ledger = self.queue.ledger
        self._stats = (
            await self.rollouter.pool.stats()
        )  # a validation of the start weights is none of the first version's
        self.watch.flush()
        async with self._tasks:
            while not ledger.done():
                await self._wait_for_samples(lambda: self.queue.stopping)
                if self.queue.stopping:
                    return
                async with self.turns.window(
                    partial(self._hold, self.watch.part, "trainer"), self.watch.part
                ):
                    await self._window()
                if not self._arriving:
                    self._validate(ledger.version)

    async def stop(self) -> None:
        """Save the state of a run that is done or was told to stop: no sample is with the trainer.

        A validation ends first: whoever asked for the stop has cancelled it.
        """
        await self.observer.validated()
        async with self.rollouter.parked("trainer"), self.turns.trainers(keep_weights=True):
            await self.observer.checkpoint(self.queue.ledger.snapshot(), last=True)

    def _validate(self, version: PolicyVersion) -> None:
        """Start a validation that is due, unless the run is stopping: the resumed run makes it."""
        if not self.queue.stopping:
            self.observer.validate(version)

    async def _wait_for_samples(self, or_else: Callable[[], bool]) -> None:
        clock = asyncio.get_running_loop().time
        start = clock()
        with self.watch.part("wait_samples"):
            can_take = self.queue.ledger.can_take
            await self.queue.wait(
                "trainer",
                "the samples of its next step",
                lambda: can_take() or or_else(),
                on=Topic.SAMPLES,
            )
        self._waited_s += clock() - start

    async def _window(self) -> None:
        """Local steps until a sync is due, then the sync."""
        ledger, queue = self.queue.ledger, self.queue
        while not ledger.sync_due():
            await self._wait_for_samples(lambda: queue.out_of_grace)
            if not ledger.can_take():
                break  # told to stop, and the rest of the window takes too long: sync what there is
            samples = queue.do(ledger.take)
            self._metrics.waited(self._waited_s, samples, ledger.trainer_version)
            self._waited_s = 0.0
            with self.watch.part("step"):
                report = await self.engine.step(TrainBatch(tuple(samples), ledger.trainer_version))
            queue.do(ledger.trained)
            self._metrics.stepped(samples, ledger.trainer_version, report)
            self.observer.stepped(samples, report)
        await self._publish()

    async def _publish(self) -> None:
        """Make the next version live, now or, with overlap_sync, while the next steps are trained. Its row, and a checkpoint if one is due.

        The row comes first: a run that goes on from the checkpoint has it. So the seconds that a checkpoint and the change
        of hands after it take are the next version's. A version that is checkpointed, or the last, is awaited: its weights
        must not step on.
        """
        ledger = self.queue.ledger
        await self._arrived()
        version = self.queue.do(ledger.seal)
        due = self.observer.checkpoint_due(version)
        if (
            ledger.schedule.overlap_sync
            and ledger.remaining() != 0
            and not due
            and not self.queue.stopping
        ):
            with self.watch.part("sync_keep"):
                await self.sync.keep(version)
            self._arriving = self._tasks.create_task(
                self._bring_beside(version, await self._close()), name=f"version-{version}"
            )
            return
        synced = await self._bring(version, self.watch.part)
        # The cut, with no await since the version is live: the trainer holds no sample, and the weights are its own until the next step.
        snapshot = ledger.snapshot()
        row = await self._close()
        self._write_row(version, row(synced=synced))
        if due:
            with self.watch.part("save_checkpoint"):
                await self.observer.checkpoint(snapshot, last=ledger.done())

    async def _bring_beside(self, version: PolicyVersion, row: MakeRow) -> None:
        """The trainer's time is that of its next steps: none of it is for this."""
        synced = await self._bring(version, untimed)
        self._write_row(version, row(synced=synced))
        self._validate(version)

    async def _arrived(self) -> None:
        """Until no version is on its way. A failure is the task group's."""
        if self._arriving is not None:
            with self.watch.part("wait_publish"):
                await asyncio.wait([self._arriving])
            self._arriving = None

    async def _bring(self, version: PolicyVersion, part: Parts) -> Synced:
        """Make the sealed version live."""
        ledger, clock = self.queue.ledger, asyncio.get_running_loop().time
        await self.turns.make_room(part)
        with part("sync_transfer"):
            transfer = await self.sync.transfer(version)
        async with self.turns.activation(partial(self._hold, part, "sync")) as held_since:
            with part("sync_activate"):
                pause_s = await self.sync.activate(version)
            self.observer.published(self.queue.do(ledger.published), ledger.totals())
        return Synced(transfer, pause_s, None if held_since is None else clock() - held_since)

    async def _close(self) -> MakeRow:
        """End the figures of the steps since the last version. What it returns makes their row, once the sync has its own."""
        after, before = await self.rollouter.pool.stats(), self._stats
        metrics, self._metrics, self._stats = self._metrics, VersionMetrics(), after
        usable_slots = self.queue.ledger.schedule.capacity * self.rollouter.roller.num_responses
        return partial(
            metrics.row,
            timing=self.watch.flush(),
            before=before,
            after=after,
            usable_slots=usable_slots,
        )

    def _write_row(self, version: PolicyVersion, row: dict[str, float]) -> None:
        self.observer.row(version, row | self.rollouter.row(version - 1))

    @asynccontextmanager
    async def _hold(self, part: Parts, who: str) -> AsyncIterator[float | None]:
        """Stop rollouts while the body runs, once a validation on the live weights has ended.

        The body gets the time since when they are stopped, or None where they need not stop.
        """
        with part("wait_validation"):
            await self.observer.validated()
        since: float | None = asyncio.get_running_loop().time()
        async with AsyncExitStack() as stack:
            with part("wait_rollouts"):
                if not await stack.enter_async_context(self.rollouter.held_still(who)):
                    since = None
            yield since
