"""The accounts of a folder over several attempts, as `millrace train` keeps them."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.config import ReportConfig
from millrace.persist.accounts import FILE
from millrace.persist.run_reader import RunReader
from millrace.report.accounts import PREFIX
from millrace.report.record import Devices, EventRecorder
from millrace.schedule.ledger import Ledger, LedgerSnapshot
from millrace.simulate.cost import CostModel
from millrace.waits.registry import Event, Registry
from tests.pipeline.simulated import RUNS, Outcome, mixed, schedule_of, simulate
from tests.report.accounts_cases import held
from tests.waiting import HANG_S

COST = CostModel(reward_s=0.3, log_prob_token_s=0.0001)
OPTIONS = ReportConfig(trace=False, samples=0.0)


class Killed(Exception):
    """The end of a process."""


@dataclass
class Folder:
    """A run folder, and the checkpoint from which its next attempt resumes."""

    path: Path
    mode: str
    options: dict[str, Any]
    snapshot: LedgerSnapshot | None = None
    counts: dict[str, float] = field(default_factory=dict)
    attempts: int = 0

    def attempt(
        self, *, stop_at: float | None = None, kill_at: float | None = None
    ) -> Outcome | None:
        """Run one attempt to its end, to a stop or to a kill."""
        self.attempts += 1
        kept: list[EventRecorder] = []

        def watchers(now: float, ledger: Ledger) -> list[Callable[[Event], None]]:
            devices = Devices(1, {"rollout-0": 1})
            clock = asyncio.get_running_loop().time
            recorder = EventRecorder(
                *(self.path, self.attempts, ledger, self.counts, devices, OPTIONS, clock),
                note=pytest.fail,
                decode=str,
            )
            kept.append(recorder)
            return [*recorder.watchers, watch]

        def watch(event: Event) -> None:
            if kill_at is not None and event.time >= kill_at:
                raise Killed

        def saving(snapshot: LedgerSnapshot) -> None:
            self.counts, self.snapshot = kept[0].counts(snapshot), snapshot

        options = {"cost": COST, "watchers": watchers, "saving": saving, **self.options}
        schedule = schedule_of(self.mode, staleness=1.5)
        outcome: Outcome | None = None
        try:
            outcome = simulate(schedule, 60, start=self.snapshot, stop_at=stop_at, **options)
        except* Killed:
            pass
        if outcome is not None:
            kept[0].end(outcome.ledger.snapshot())
        return outcome


FOLDERS = st.fixed_dictionaries(
    {
        "chance": st.sampled_from([None, mixed]),
        "save_s": st.sampled_from([0.0, 0.5, 3.0]),
        "greedy": st.booleans(),
    }
)


@settings(max_examples=25, deadline=None)
@given(mode=st.sampled_from(RUNS), stop_at=st.floats(0.5, 60.0), options=FOLDERS)
def test_a_resumed_run_continues_the_accounts_of_a_stop(
    mode: str, stop_at: float, options: dict[str, Any]
) -> None:
    """Tokens that a stop threw away are regenerated, at the stop and ever after. None is lost."""
    with TemporaryDirectory() as path:
        folder = Folder(Path(path), mode, options)
        first = folder.attempt(stop_at=stop_at)
        assert first is not None
        if first.ledger.done():  # the stop came too late
            return
        stopped = RunReader(Path(path)).read().accounts[-1]
        folder.attempt()
        lines = RunReader(Path(path)).read().accounts
        second = next(line for line in lines if line.attempt == 2)
        assert stopped.event == "end"
        assert (second.generated, second.tokens) == (stopped.generated, stopped.tokens)
        assert not any("lost" in line.tokens for line in lines)
        assert all(sum(line.tokens.values()) == line.generated for line in lines)


@settings(max_examples=25, deadline=None)
@given(
    mode=st.sampled_from(RUNS),
    kills=st.lists(st.floats(1.0, 60.0), min_size=1, max_size=3),
    options=FOLDERS,
)
def test_a_killed_run_counts_every_drop_once(
    mode: str, kills: list[float], options: dict[str, Any]
) -> None:
    """A checkpoint has the drops up to its own moment, however late it is written."""
    with TemporaryDirectory() as path:
        folder = Folder(Path(path), mode, options)
        for kill_at in kills:
            folder.attempt(kill_at=kill_at)
            check_checkpoint(folder)
        folder.attempt()
        lines = RunReader(Path(path)).read().accounts
        assert all(sum(line.tokens.values()) == line.generated for line in lines)
        generated = [line.generated for line in lines]
        assert generated == sorted(generated)


def check_checkpoint(folder: Folder) -> None:
    """The buckets of a checkpoint are those of the accounts when its version was published."""
    snapshot = folder.snapshot
    if snapshot is None:
        return
    of_version = [
        line for line in RunReader(folder.path).read().accounts if line.version == snapshot.version
    ]
    line = [line for line in of_version if line.event == "version"][-1]
    found = {name.removeprefix(PREFIX): int(n) for name, n in folder.counts.items() if n}
    expected = {name: n for name, n in line.tokens.items() if name != "held"}
    assert found == expected
    assert held(snapshot) <= line.tokens.get("held", 0)


def recorder_in(folder: Path, notes: list[str]) -> EventRecorder:
    ledger = Ledger(schedule_of("async_partial"), 60)
    devices = Devices(1, {"rollout-0": 1})
    return EventRecorder(
        folder, 1, ledger, {}, devices, OPTIONS, lambda: 0.0, note=notes.append, decode=str
    )


def test_a_link_in_the_place_of_the_accounts_is_not_followed(tmp_path: Path) -> None:
    elsewhere, notes = tmp_path / "diary.txt", list[str]()
    elsewhere.write_text("monday\nan unfinished line")
    (tmp_path / FILE).symlink_to(elsewhere)
    recorder_in(tmp_path, notes)
    assert elsewhere.read_text() == "monday\nan unfinished line"
    assert not notes and [line.event for line in RunReader(tmp_path).read().accounts] == ["start"]


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_a_run_goes_on_without_accounts(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A pipe would let the run wait for its reader."""
    notes = list[str]()
    make(tmp_path / FILE)
    thread = threading.Thread(target=recorder_in, args=(tmp_path, notes), daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert len(notes) == 1 and "it is not a file. The run goes on" in notes[0]


def test_accounts_that_cannot_be_read_do_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_bytes(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    notes = list[str]()
    (tmp_path / FILE).write_text("")
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    recorder_in(tmp_path, notes)
    assert len(notes) == 1 and "Permission denied" in notes[0]


def test_files_are_closed_at_the_same_time(tmp_path: Path) -> None:
    """Each file waits here until the other one is closed too."""
    recorder, both = recorder_in(tmp_path, []), threading.Barrier(2)
    file = SimpleNamespace(close=lambda: both.wait(HANG_S))
    recorder._files += [file, file]  # type: ignore[list-item]
    recorder.close()
    assert not both.broken


def test_the_states_at_the_start_have_no_time_before_the_trace(tmp_path: Path) -> None:
    """Perfetto throws negative times away."""
    devices = Devices(1, {"rollout-0": 1})
    made = Ledger(schedule_of("async_partial"), 64)
    options = ReportConfig(samples=0.0)
    recorder = EventRecorder(tmp_path, 1, made, {}, devices, options, time.monotonic, print, str)
    Registry("run", time.monotonic, *recorder.watchers).switch("trainer", "train")
    recorder.close()
    lines = json.loads((tmp_path / "trace/attempt-001-000.json").read_text())
    begun = [line for line in lines if line["name"] in ("idle", "other")]
    assert len(begun) >= 3 and min(line["ts"] for line in lines) >= 0
