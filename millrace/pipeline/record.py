"""The Trainer's Observer: writes rows, history and checkpoints, and starts validations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from millrace.errors import DeadlineError, DiskError, ReplicaLost, SaveLost
from millrace.observe.guard import Guard
from millrace.observe.metrics import GAP, GAP_LIMIT, RunCounts
from millrace.observe.progress import Progress
from millrace.observe.sinks import Sink
from millrace.persist.history import History
from millrace.pipeline.checkpoint import Checkpoints
from millrace.pipeline.validation import OnScored, Result, Validator
from millrace.ports import TrainEngine
from millrace.schedule.ledger import LedgerSnapshot, Totals
from millrace.types import PolicyVersion, Sample
from millrace.waits.registry import Event, acting, at, doing, span, waiting

DISK = "the disk"


class DiskAlarm:
    """Says once that the disk refuses a file, and once that it takes it again.

    The run goes on meanwhile.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._refused: set[str] = set()
        self.checkpoints = 0
        """The checkpoints that were refused."""

    def refused(self, what: str, error: Exception) -> None:
        if what not in self._refused:
            self._refused.add(what)
            text = f"the disk refuses {what}. The run goes on, and tries again later. {error}"
            self._progress.note(f"alarm: {text}")
            at("run", "alarm_began", f"disk: {what}", text=text)

    def taken(self, what: str) -> None:
        if what in self._refused:
            self._refused.remove(what)
            self._progress.note(f"alarm over: the disk takes {what} again")
            at("run", "alarm_ended", f"disk: {what}")

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Let the body write `what`."""
        try:
            yield
        except (DiskError, OSError) as error:
            self.refused(what, error)
        else:
            self.taken(what)


class RunRecord:
    """The record of a run. Frequencies count versions; 0 means never."""

    names = frozenset({"stepped"})
    """The events that it watches, to show the progress."""

    def __init__(
        self,
        *,
        history: History,
        checkpoints: Checkpoints,
        engine: TrainEngine,
        validator: Validator | None,
        sinks: Sequence[Sink],
        progress: Progress,
        save_freq: int,
        async_save: bool,
        test_freq: int,
        guard: Guard | None,
        counts: RunCounts,
        deadline_s: float,
        tasks: asyncio.TaskGroup,
        figures: Callable[[PolicyVersion], dict[str, float]] = lambda version: {},
        tokens: Callable[[LedgerSnapshot], dict[str, float]] = lambda snapshot: {},
        on_gap: Callable[[str], None] = lambda figures: None,
        on_row: Callable[[PolicyVersion, dict[str, float], Result | None], None] = (
            lambda version, row, validation: None
        ),
    ) -> None:
        """`figures` returns what the loops do not know, for the row of a version.

        `tokens` returns the counts of tokens that a checkpoint keeps. `on_gap` gets the figures of
        a version whose engines disagree. `on_row` gets each row that is written, and the last
        validation.
        """
        self.first: Result | None = None
        self.last: Result | None = None
        self._history = history
        self._checkpoints = checkpoints
        self._engine = engine
        self._validator = validator
        self._sinks = sinks
        self._progress = progress
        self._save_freq = save_freq
        self._async_save = async_save
        self._test_freq = test_freq
        self._guard = guard
        self._counts = counts
        self._deadline_s = deadline_s
        self._tasks = tasks
        self._figures = figures
        self._tokens = tokens
        self.gap_limit: float | None = None
        """The limit of a version's gap, once the proof of the engines has measured it."""
        self._on_gap, self._on_row = on_gap, on_row
        self._validation: asyncio.Task[None] | None = None
        self._cut = False
        """Whether the last validation was cut short, because no replica had its weights any more."""
        self._saving: asyncio.Task[None] | None = None
        self._saved: PolicyVersion | None = None
        self._write_s: list[float] = []
        self._disk = DiskAlarm(progress)

    def published(self, trained: list[int], totals: Totals) -> None:
        with self._disk.of("history.jsonl"), doing("a line of history.jsonl", by=DISK):
            self._history.version(totals, trained)

    def __call__(self, event: Event) -> None:
        """Show a local step."""
        samples: list[Sample] = event.facts["samples"]
        scores = [t.score.value for s in samples for t in s.trajectories if t.score is not None]
        self._progress.trained(len(samples), sum(scores) / max(1, len(scores)))

    def row(self, version: PolicyVersion, row: dict[str, float]) -> None:
        """Write a metrics row, with checkpoint/write_s if a checkpoint completed since the last.

        checkpoint/write_s is the seconds from the start of the save to its completion. The
        trainer's wait for it is included. If two checkpoints completed, the longer time counts.
        """
        row = row | self._counts.add(row) | self._figures(version)
        if self._write_s:
            row, self._write_s = row | {"checkpoint/write_s": max(self._write_s)}, []
        if self._disk.checkpoints:
            row = row | {"checkpoint/refused": self._disk.checkpoints}
        if self.gap_limit is not None and GAP in row:
            row = row | {GAP_LIMIT: self.gap_limit}
        if self._guard is not None:
            active = self._guard.check(version, row)
            if GAP_LIMIT in row and any(alarm.name == "log_prob_gap" for alarm in active):
                self._on_gap(f"version {version}: mean {row[GAP]:.3g}, limit {row[GAP_LIMIT]:.3g}")
            row = row | self._guard.as_metrics()
            for alarm in self._guard.began:
                self._progress.note(f"alarm: {alarm}")
                at("run", "alarm_began", alarm.name, text=str(alarm))
            for alarm in self._guard.ended:
                self._progress.note(f"alarm over at version {version}: {alarm.name}")
                at("run", "alarm_ended", alarm.name)
        at("run", "row", str(version), row=row)
        with doing(f"the metrics row of version {version}", by=DISK):
            self._write(version, row)
        self._progress.row(version, row)
        self._on_row(version, row, self.last)

    def _write(self, version: PolicyVersion, row: dict[str, float]) -> None:
        for sink in self._sinks:
            with self._disk.of(type(sink).__name__):
                sink.write(version, row)

    def checkpoint_due(self, version: PolicyVersion) -> bool:
        return bool(self._save_freq) and version % self._save_freq == 0

    async def checkpoint(self, snapshot: LedgerSnapshot, *, last: bool = False) -> None:
        """Save a checkpoint. If the disk refuses it, the run goes on unless it is the last one."""
        await self.checkpointed()  # One at a time.
        if self._saved == snapshot.version and not snapshot.slots:
            return
        start, staged = asyncio.get_running_loop().time(), self._async_save and not last
        counts = self._counts.counts | self._tokens(snapshot)
        try:
            await self._checkpoints.begin(snapshot, self._engine, staged=staged)
        except DiskError as error:
            self._refuse(error, last)
            return
        self._saved = snapshot.version
        self._saving = self._tasks.create_task(
            self._finish(snapshot, counts, start, last), name="checkpoint"
        )
        if not staged:
            await self.checkpointed()

    async def checkpointed(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._saving is not None:
            with waiting("checkpoint", "the checkpoint to be written"):
                await asyncio.wait([self._saving])  # The task group raises a failure.
            self._saving = None

    def _refuse(self, error: DiskError, last: bool) -> None:
        if last:
            raise error
        self._saved = None
        self._disk.checkpoints += 1
        if isinstance(error, SaveLost):
            self._progress.note(f"alarm: a checkpoint is left out, and the run goes on: {error}")
        else:
            self._disk.refused("a checkpoint", error)

    async def _finish(
        self, snapshot: LedgerSnapshot, counts: dict[str, float], start: float, last: bool
    ) -> None:
        try:
            async with asyncio.timeout(self._deadline_s) as limit:
                with (
                    acting("checkpoint"),
                    span("checkpoint", "write", str(snapshot.version)) as writes,
                ):
                    self._history.catch_up()
                    folder = await self._checkpoints.finish(snapshot, self._engine, counts)
                    writes.facts["folder"] = folder.name
        except TimeoutError as error:
            if not limit.expired():  # The file system raised its own TimeoutError.
                raise
            waited = (
                f"the run waited {self._deadline_s:g} s for the checkpoint of version "
                f"{snapshot.version} to be written"
            )
            raise DeadlineError(f"{waited}. Limit: trainer.wait_deadline_s") from error
        except DiskError as error:
            self._refuse(error, last)
            return
        self._disk.taken("a checkpoint")
        self._write_s.append(asyncio.get_running_loop().time() - start)

    def validate(self, version: PolicyVersion) -> None:
        if self._cut or (self._test_freq and version % self._test_freq == 0):
            self._begin_validation(version)

    async def validate_now(self, version: PolicyVersion, phase: str) -> bool:
        """Validate the live weights as a phase of the progress, and wait for the end.

        Weights that are already validated are skipped. Return False if it was cut short, because no
        replica has the weights any more.
        """
        self._begin_validation(version, phase)
        await self.validated()
        return not self._cut

    def _begin_validation(self, version: PolicyVersion, phase: str = "") -> None:
        """Validate the live weights while rollouts continue. The next sync waits for the end."""
        if self._validator is None or (self.last is not None and self.last.version == version):
            return
        on_scored = partial(self._progress.phase, phase) if phase else None
        if phase:
            self._progress.phase(phase)
        self._validation = self._tasks.create_task(
            self._run_validation(self._validator, version, on_scored), name="validation"
        )

    async def validated(self) -> None:
        """Wait for a validation to end. Its requests and rewards have their own deadlines."""
        if self._validation is not None:
            # The task group raises a failure. A cancelled validation is not a failure.
            with waiting("validation", "its end"):
                await asyncio.wait([self._validation])
            self._validation = None

    def abandon_validation(self) -> None:
        """Cancel a running validation, because the run must stop and should not wait for it."""
        if self._validation is not None:
            self._validation.cancel()

    async def _run_validation(
        self, validator: Validator, version: PolicyVersion, on_scored: OnScored | None
    ) -> None:
        with acting("validation"), span("validation", "validate", str(version)) as validates:
            try:
                result = await validator.run(version, on_scored)
            except ReplicaLost as error:
                self._cut = True
                then = (
                    "the next version is validated instead" if on_scored is None else "begins anew"
                )
                self._progress.note(
                    f"the validation of version {version} was cut short, and {then}: {error}"
                )
                return
            validates.facts["values"] = result.values
        self._cut = False
        self.last = result
        if version == 0:
            self.first = result
        self._write(version, result.values)
        self._progress.validated(version, result.values)
