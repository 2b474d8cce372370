"""The consequences of a version.

These are rows, history, checkpoints and validations. Each happens when it is due, and once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millrace.config import GuardConfig
from millrace.errors import CheckpointError, DeadlineError, DiskError
from millrace.observe.guard import Guard
from millrace.observe.metrics import RunCounts
from millrace.observe.progress import Progress, State
from millrace.persist.history import History, read
from millrace.pipeline.record import RunRecord
from millrace.pipeline.validation import Result
from millrace.schedule.ledger import LedgerSnapshot, Slot, Totals
from millrace.types import Prompt, Sample, Score, Trajectory, tokens_of
from millrace.waits.registry import Event
from tests.waiting import HANG_S

PROMPT = Prompt(0, tokens_of([1]), "", "d")


@dataclass
class View:
    notes: list[str] = field(default_factory=list)

    def open(self) -> None: ...
    def close(self) -> None: ...
    def update(self, state: State, event: str) -> None: ...
    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class Saves:
    """Checkpoints that become whole once `gate` is set, or fail."""

    versions: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    staged: list[bool] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    """Optimizer steps of the run up to each whole checkpoint."""
    gate: asyncio.Event | None = None
    error: Exception | None = None

    async def begin(self, snapshot: LedgerSnapshot, engine: object, *, staged: bool) -> None:
        self.versions.append(snapshot.version)
        self.staged.append(staged)

    async def finish(
        self, snapshot: LedgerSnapshot, engine: object, counts: dict[str, float]
    ) -> Path:
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.whole.append(snapshot.version)
        self.steps.append(counts["optimizer_steps"])
        return Path(f"version-{snapshot.version}")


@dataclass
class SlowValidator:
    """A validator that takes one turn of the event loop, or never ends."""

    ran: list[int] = field(default_factory=list)
    stuck: bool = False

    async def run(self, version: int, on_scored: object = None) -> Result:
        self.ran.append(version)
        await (asyncio.Event().wait() if self.stuck else asyncio.sleep(0))
        return Result(version, {"val/d/mean@1": version / 10}, ())


@dataclass
class Rows:
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def write(self, version: int, row: dict[str, float]) -> None:
        self.rows.append((version, row))

    def close(self) -> None: ...


@dataclass
class Bench:
    record: RunRecord
    saves: Saves
    validator: SlowValidator
    rows: Rows
    view: View


def snapshot(version: int, held: int = 0) -> LedgerSnapshot:
    return LedgerSnapshot(
        version, version, held, 0, {}, [(i, Slot(PROMPT, 0)) for i in range(held)]
    )


@asynccontextmanager
async def bench(
    tmp_path: Path,
    *,
    save_freq: int = 0,
    async_save: bool = True,
    test_freq: int = 0,
    stuck: bool = False,
    deadline_s: float = HANG_S,
) -> AsyncIterator[Bench]:
    saves, validator, rows, view = Saves(), SlowValidator(stuck=stuck), Rows(), View()
    fakes: dict[str, Any] = {
        "checkpoints": saves,
        "engine": None,
        "validator": validator,
        "sinks": [rows],
    }
    async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as tasks:
        record = RunRecord(
            history=History(tmp_path, Totals(0, 0, 0, {}, [])),
            progress=Progress(view, "t", "t"),
            save_freq=save_freq,
            async_save=async_save,
            test_freq=test_freq,
            counts=RunCounts(),
            guard=Guard(GuardConfig()),
            deadline_s=deadline_s,
            tasks=tasks,
            **fakes,
        )
        yield Bench(record, saves, validator, rows, view)


@pytest.mark.parametrize(("freq", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (7, [])])
async def test_checkpoints_are_due_every_save_freq_versions_and_never_at_0(
    tmp_path: Path, freq: int, due: list[int]
) -> None:
    async with bench(tmp_path, save_freq=freq) as b:
        assert [v for v in range(1, 7) if b.record.checkpoint_due(v)] == due


async def test_a_version_is_saved_once_unless_samples_are_held_whose_progress_may_have_grown(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as b:
        for cut in (snapshot(1), snapshot(1), snapshot(2, held=3), snapshot(2, held=3)):
            await b.record.checkpoint(cut)
        assert b.saves.versions == [1, 2, 2]


async def test_a_checkpoint_is_written_beside_what_follows_and_the_next_one_waits_for_it(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as b:
        b.saves.gate = asyncio.Event()
        await b.record.checkpoint(snapshot(1))
        b.record.row(2, {})
        second = asyncio.create_task(b.record.checkpoint(snapshot(2)))
        await asyncio.sleep(0.01)
        assert (b.saves.versions, b.saves.whole) == ([1], [])
        b.saves.gate.set()
        await second
        b.record.row(3, {})
        assert (b.saves.versions, b.saves.staged) == ([1, 2], [True, True])
    assert b.saves.whole == [1, 2], "leaving the group waits too"
    assert ["checkpoint/write_s" in row for _, row in b.rows.rows] == [False, True]
    assert 0.01 <= b.rows.rows[1][1]["checkpoint/write_s"] < HANG_S


@pytest.mark.parametrize(("async_save", "last"), [(True, True), (False, False), (False, True)])
async def test_a_checkpoint_that_is_not_to_be_written_beside_anything_is_not_staged_and_whole_on_return(
    tmp_path: Path, async_save: bool, last: bool
) -> None:
    async with bench(tmp_path, async_save=async_save) as b:
        await b.record.checkpoint(snapshot(1), last=last)
        assert (b.saves.whole, b.saves.staged) == ([1], [False])


async def test_the_last_checkpoint_is_whole_on_return_also_where_its_version_is_being_written_already(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as b:
        b.saves.gate = asyncio.Event()
        await b.record.checkpoint(snapshot(1))
        asyncio.get_running_loop().call_later(0.01, b.saves.gate.set)
        await b.record.checkpoint(snapshot(1), last=True)
        assert (b.saves.versions, b.saves.whole) == ([1], [1])


@pytest.mark.parametrize("waiting", [True, False])
async def test_a_checkpoint_that_fails_while_the_run_goes_on_ends_the_run(
    tmp_path: Path, waiting: bool
) -> None:
    """The trainer may wait for the checkpoint or for something else."""
    after: list[int] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with bench(tmp_path) as b:
            b.saves.gate, b.saves.error = (
                asyncio.Event(),
                CheckpointError("engine/x: no space left"),
            )
            await b.record.checkpoint(snapshot(1))
            asyncio.get_running_loop().call_later(0.01, b.saves.gate.set)
            await (b.record.checkpoint(snapshot(2)) if waiting else asyncio.Event().wait())
            after.extend(b.saves.versions)
    assert [str(error) for error in caught.value.exceptions] == [
        "engine/x: no space left"
    ] and not after


@pytest.mark.parametrize("async_save", [True, False])
async def test_a_run_goes_on_while_a_disk_refuses_checkpoints_but_not_without_the_last_one(
    tmp_path: Path, async_save: bool
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with bench(tmp_path, async_save=async_save) as b:
            b.saves.error = DiskError("engine/x: no space left")
            for version in (1, 2):
                await b.record.checkpoint(snapshot(version))
                await b.record.checkpointed()
            assert [n for n in b.view.notes if "alarm" in n] == [
                "alarm: the disk refuses a checkpoint. The run goes on, and tries again later. "
                "engine/x: no space left"
            ]
            b.saves.error = None
            await b.record.checkpoint(snapshot(2))  # the same version once more
            await b.record.checkpointed()
            assert b.view.notes[-1] == "alarm over: the disk takes a checkpoint again"
            b.record.row(2, {})
            assert b.rows.rows[-1][1]["checkpoint/refused"] == 2 and b.saves.whole == [2]
            b.saves.error = DiskError("engine/x: no space left")
            await b.record.checkpoint(snapshot(3), last=True)
    assert isinstance(caught.value.exceptions[0], DiskError)


async def test_a_checkpoint_that_is_never_whole_ends_the_run_at_its_deadline(
    tmp_path: Path,
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with bench(tmp_path, deadline_s=0.05) as b:
            b.saves.gate = asyncio.Event()
            await b.record.checkpoint(snapshot(7))
            await asyncio.Event().wait()
    (error,) = caught.value.exceptions
    assert isinstance(error, DeadlineError) and "0.05 s for the checkpoint of version 7" in str(
        error
    )


async def test_validations_run_every_test_freq_versions_once_each_while_the_caller_goes_on(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, test_freq=2) as b:
        await b.record.validate_now(0, "validating")
        for version in range(1, 5):
            b.record.validate(version)
            assert b.validator.ran == [v for v in (0, 2, 4) if v < version], "it has not begun yet"
            await b.record.validated()
        assert b.validator.ran == [0, 2, 4]
        await b.record.validate_now(4, "validating")
        assert b.validator.ran == [0, 2, 4], "version 4 is validated already"
        await b.record.validate_now(5, "validating")
        assert b.record.first is not None and b.record.first.version == 0
        assert b.record.last is not None and b.record.last.version == 5
        assert b.rows.rows == [(v, {"val/d/mean@1": v / 10}) for v in (0, 2, 4, 5)]
        assert b.view.notes[-1] == "validation of version 5: d/mean@1 0.500"


async def test_a_validation_is_abandoned_where_a_run_is_told_to_stop(tmp_path: Path) -> None:
    async with bench(tmp_path, test_freq=1, stuck=True) as b:
        b.record.validate(1)
        await asyncio.sleep(0)
        b.record.abandon_validation()
        await asyncio.wait_for(b.record.validated(), HANG_S)
        assert b.record.last is None


async def test_a_version_is_in_the_history_when_published_returns(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        b.record.published([4, 2], Totals(1, 2, 0, {}, [0, 1]))
        last = read(tmp_path)[-1]
        assert (last.event, last.version, last.trained, last.slots) == (
            "version",
            1,
            [4, 2],
            [0, 1],
        )


async def test_steps_and_rewards_add_up(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        samples = [
            Sample(
                PROMPT,
                (Trajectory.of((), Score(1.0)), Trajectory.of((), Score(0.0)), Trajectory.of(())),
            )
            for _ in range(3)
        ]
        b.record(Event(0.0, "trainer", "stepped", "at", "", {"samples": samples}))
        b.record(Event(0.0, "trainer", "stepped", "at", "", {"samples": samples[:1]}))
        progress = b.record._progress.state
        assert progress.samples == 4 and progress.rewards == [0.5, 0.5]


async def test_an_alarm_is_noted_as_it_begins_and_ends_and_is_in_every_row(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        for version, share in enumerate((0.1, 0.99, 0.99, 0.1), start=1):
            b.record.row(version, {"train/zero_advantage_share": share})
        assert [row["alarm/zero_variance"] for _, row in b.rows.rows] == [0.0, 1.0, 1.0, 0.0]
        first, last = b.view.notes
        assert (
            first.startswith("alarm: zero_variance since version 2: 0.99")
            and "algorithm.filter_groups.enable" in first
        )
        assert last == "alarm over at version 4: zero_variance"
