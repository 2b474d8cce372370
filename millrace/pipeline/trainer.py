"""The Trainer: takes ready samples, steps the train engine, syncs weights.

    consumes   READY samples of the ledger
    waits for  the samples of the next local step; rollouts to pause; a running validation; the
               write of a checkpoint
    produces   policy versions; for each one a metrics row and, if due, a checkpoint and a
               validation

All modes share one loop. The Schedule decides how many samples it takes, when it syncs and for how
long rollouts pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Protocol

from millrace.observe.metrics import GAP, MakeRow, RunMetrics
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.sample_queue import SampleQueue
from millrace.pipeline.turns import DeviceSharing, Pause, Publisher
from millrace.ports import RolloutStats, TrainBatch, TrainEngine, WeightSync
from millrace.replicas.roster import Roster
from millrace.schedule.continuation import next_prompt
from millrace.schedule.ledger import LedgerSnapshot, State, Topic, Totals
from millrace.types import PolicyVersion, Sample
from millrace.waits.registry import acting, at, current, part, starting


class Observer(Protocol):
    """The effects of a version outside the loop: rows, history, checkpoints, validation."""

    def published(self, trained: list[int], totals: Totals) -> None:
        """Record a live version, which retired the samples `trained`. It is durable on return."""
        ...

    def row(self, version: PolicyVersion, row: dict[str, float]) -> None: ...

    def checkpoint_due(self, version: PolicyVersion) -> bool: ...

    async def checkpoint(self, snapshot: LedgerSnapshot, *, last: bool = False) -> None:
        """Save this snapshot. On return training may continue.

        The checkpoint may still be incomplete on return, unless it is the `last` one.
        """
        ...

    async def validated(self) -> None:
        """Wait until no validation runs. A validation uses the live weights."""
        ...

    def validate(self, version: PolicyVersion) -> None:
        """Start a validation on the live weights, if one is due."""
        ...


class Prover(Protocol):
    """Compares what replicas draw with the trainer's log-probs of the same weights."""

    async def run(self, version: PolicyVersion) -> object:
        """Prove every replica before the first step. Raises GapError."""
        ...

    def due(self) -> bool:
        """Whether a replica must be proven before its samples are trained."""
        ...

    def saw_gap(self) -> None:
        """Note that a step has measured the gap of its version."""
        ...

    async def probe(self, version: PolicyVersion, pause: Pause) -> None:
        """Prove the replicas that serve now. The trainer has the weights of `version`."""
        ...


class Trainer:
    """The training side of the pipeline."""

    def __init__(
        self,
        queue: SampleQueue,
        rollouter: Rollouter,
        engine: TrainEngine,
        turns: DeviceSharing,
        sync: WeightSync,
        observer: Observer,
        prover: Prover | None = None,
        lr_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`lr_scale` returns the factor on the learning rate of the next step."""
        self.queue = queue
        self.rollouter = rollouter
        self.engine = engine
        self.turns = turns
        self.publisher = Publisher(turns, sync)
        self.observer = observer
        self.prover = prover
        self._lr_scale = lr_scale
        self._metrics: RunMetrics
        self._stats = RolloutStats()
        self._waited_s = 0.0
        self._tasks = asyncio.TaskGroup()
        self._arriving: asyncio.Task[None] | None = None
        """The sync of a version that is on its way while the next steps run."""

    async def begin(self) -> None:
        """Send the start weights from the trainer to every replica, and prove the replicas.

        The trainer has the shared devices until the weights are live.
        """
        version = self.queue.ledger.version
        with starting("first sync"):
            await self.publisher.transfer(version)
            await self.publisher.activate(version)
            await self.turns.leave()
        self._stats = await self.rollouter.pool.stats()
        if self.prover is not None:
            with starting("proof"):
                await self.prover.run(version)

    async def run(self) -> None:
        """Train until every sample of the run is trained and live, or the run must stop."""
        ledger = self.queue.ledger
        registry = current().registry
        self._metrics = metrics = RunMetrics(
            registry.clock(),
            shared=ledger.schedule.colocated,
            sessions=self.rollouter.tells_sessions,
        )
        with registry.watched_by(metrics):
            # The figures of the first version exclude the validation of the start weights.
            self._stats = await self.rollouter.pool.stats()
            metrics.begin(registry.clock())
            await self._train_all()

    async def _train_all(self) -> None:
        ledger = self.queue.ledger
        async with self._tasks:
            while not ledger.done():
                await self._probe()
                await self._wait_for_samples(lambda: self.queue.stopping or self._roster.starved)
                if self.queue.stopping:
                    return
                if not ledger.can_take():
                    await self.republish_live()
                    continue
                async with self.turns.window(self._pause):
                    await self._window()
                if not self._arriving:
                    self._validate(ledger.version)

    @property
    def _roster(self) -> Roster:
        return self.rollouter.pool.roster

    async def republish_live(self) -> None:
        """Send the live version again if no replica serves. Nothing was trained since."""
        await self._arrived()
        if self._roster.live:
            return
        version = self.queue.ledger.version
        async with self.turns.window(self._pause):
            await self.publisher.transfer(version)
            await self.publisher.activate(version)

    @property
    def _probe_due(self) -> bool:
        return self.prover is not None and not self.queue.stopping and self.prover.due()

    async def _probe(self) -> None:
        """Prove replicas that joined or recovered, while the trainer has the live weights."""
        if self.prover is not None and self._probe_due and self._arriving is None:
            with part("wait_validation"), acting("proof"):
                await self.prover.probe(self.queue.ledger.version, self._pause)

    async def stop(self) -> None:
        """Save the state of a stopped run. No sample is with the trainer.

        A validation ends first. The stop has already cancelled it.
        """
        await self.observer.validated()
        async with (
            self.rollouter.pause_for_save(),
            self.turns.trainer_turn(keep_weights=True),
        ):
            await self.observer.checkpoint(self.queue.ledger.snapshot(), last=True)

    def _validate(self, version: PolicyVersion) -> None:
        """Start a due validation. If the run is stopping, the resumed run does this instead."""
        if not self.queue.stopping:
            self.observer.validate(version)

    async def _wait_for_samples(self, or_else: Callable[[], bool]) -> None:
        # With overlap_sync, the slots of these samples may become free with a sync on its way.
        with part("wait_samples") as wait, self._roster.extended_wait(self.queue.renew):
            can_take = self.queue.ledger.can_take
            await self.queue.wait(
                "trainer",
                "the samples of its next step",
                lambda: can_take() or or_else(),
                on=Topic.SAMPLES,
            )
        self._waited_s += wait.seconds

    async def _window(self) -> None:
        """Local steps until a sync is due, then the sync."""
        ledger, queue = self.queue.ledger, self.queue
        while not ledger.sync_due():
            await self._wait_for_samples(lambda: queue.out_of_grace or self._roster.starved)
            if not ledger.can_take():
                if ledger.count(State.TRAINED):
                    break  # A stop that takes too long, or no replica serves: sync the first part.
                if queue.out_of_grace:
                    return
                await self.republish_live()
                continue
            samples = queue.do(ledger.take)
            self._name_wait(samples)
            with part("train"):
                batch = TrainBatch(tuple(samples), ledger.trainer_version, self._lr_scale())
                report = await self.engine.step(batch)
            going_on = [sample for sample in samples if sample.goes_on]
            rests = [next_prompt(*one) for one in zip(going_on, report.values, strict=True)]
            queue.do(ledger.trained, rests)
            if queue.journal is not None:
                queue.journal.stepped(batch)
            version = ledger.trainer_version
            at("trainer", "stepped", samples=samples, version=version, report=report)
            if self.prover is not None and GAP in report.metrics:
                self.prover.saw_gap()
        await self._publish()

    def _name_wait(self, samples: list[Sample]) -> None:
        """Name the wait for `samples` wait_prev_gen, if one was admitted under an earlier version."""
        version, seconds = self.queue.ledger.trainer_version, self._waited_s
        if seconds and any(s.admitted_version < version for s in samples):
            renamed = {"source": "wait_samples", "target": "wait_prev_gen"}
            at("trainer", "relabelled", seconds=seconds, **renamed)
        self._waited_s = 0.0

    async def _publish(self) -> None:
        """Make the next version live. Write its row, and a checkpoint if one is due.

        With overlap_sync the version arrives while the next steps run. A version with a checkpoint,
        or the last one, does not overlap, because its weights must not change. The row comes before
        the checkpoint, so a run that resumes from the checkpoint has the row. The seconds of the
        checkpoint and of the next change of devices therefore count for the next version.
        """
        ledger = self.queue.ledger
        await self._arrived()
        version = self.queue.do(ledger.seal)
        due, journal = self.observer.checkpoint_due(version), self.queue.journal
        due = (journal is not None and journal.checkpoint_due(version)) or due
        if (
            ledger.schedule.overlap_sync
            and ledger.remaining() != 0
            and not due
            and not self._probe_due
            and not self.queue.stopping
        ):
            await self.publisher.keep(version)
            row = self._close(await self.rollouter.pool.stats())
            self._arriving = self._tasks.create_task(
                self._publish_in_background(version, row), name=f"version-{version}"
            )
            return
        stats: list[RolloutStats] = []
        await self._activate(version, stats)
        # Nothing is awaited between the new version and this snapshot, so the trainer has no
        # sample. The weights do not change until the next step. Nor does the next step wait for
        # the requests that the new version's free slots begin.
        snapshot = ledger.snapshot() if due else None
        self._write_row(version, self._close(*stats))
        if snapshot is not None:
            with part("save_checkpoint"):
                await self.observer.checkpoint(snapshot, last=ledger.done())

    async def _publish_in_background(self, version: PolicyVersion, row: MakeRow) -> None:
        """Make the version live while the next steps run. The time counts for `sync` alone."""
        with acting("sync"):
            await self._activate(version)
            self._write_row(version, row)
        self._validate(version)

    async def _arrived(self) -> None:
        """Wait until no version is on its way. The task group raises a failure."""
        if self._arriving is not None:
            with part("wait_publish", "sync", "the version that is on its way"):
                await asyncio.wait([self._arriving])
            self._arriving = None

    async def _activate(
        self, version: PolicyVersion, stats: list[RolloutStats] | None = None
    ) -> None:
        """Make the sealed version live. Append the totals of the replicas before it to `stats`."""
        ledger = self.queue.ledger
        await self.publisher.transfer(version)
        async with self.turns.activation(self._pause):
            with part("sync_activate"):
                if stats is not None:  # Both calls travel in one frame.
                    reading = self._tasks.create_task(self.rollouter.pool.stats(), name="stats")
                await self.publisher.activate(version)
                if stats is not None:
                    stats.append(await reading)
            retired, totals = self.queue.do(ledger.published), ledger.totals()
            self.observer.published(retired, totals)
            at("run", "published", version=version, ids=retired, totals=totals)

    def _close(self, after: RolloutStats) -> MakeRow:
        """Close the figures of the steps since the last version. `after` has the totals of now.

        Return a function that takes the figures of the sync and makes the row.
        """
        before, self._stats = self._stats, after
        usable_slots = self.queue.ledger.schedule.capacity * self.rollouter.roller.num_responses
        return partial(
            self._metrics.close(current().registry.clock()),
            before=before,
            after=after,
            usable_slots=usable_slots,
        )

    def _write_row(self, version: PolicyVersion, row: MakeRow) -> None:
        made = self._metrics.synced_row(current().registry.clock(), row)
        self.observer.row(version, made | self.rollouter.row(version - 1))

    @asynccontextmanager
    async def _pause(self) -> AsyncIterator[None]:
        """Pause rollouts while the body runs, after a validation of the live weights has ended."""
        with part("wait_validation"):
            await self.observer.validated()
        async with AsyncExitStack() as stack:
            with part("wait_rollouts"):
                await stack.enter_async_context(self.rollouter.pause_for_sync())
            yield
