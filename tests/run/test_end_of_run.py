"""The report and the advice at the end of a run never change how the run ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.config import recipe
from millrace.errors import MillraceError
from millrace.observe.progress import Progress
from millrace.run import train as at_train
from millrace.run.signals import StopRequest
from millrace.run.train import Outcome, train
from tests.e2e.runs import RECIPE, progress
from tests.waiting import HANG_S


def outcome_of(folder: Path) -> Outcome:
    return Outcome(folder, "async_partial", 1, 1, 1, 1.0, None, None, True, None)


async def end_while_writing(
    patch: pytest.MonkeyPatch, folder: Path, error: Exception | None
) -> tuple[Outcome, StopRequest]:
    """Run `train` without engines, and stop it while it writes the report."""
    writing, written = threading.Event(), threading.Event()

    @asynccontextmanager
    async def open_session(*_: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(run=SimpleNamespace(path=folder, resume_from=None))

    async def start_state(_: Any) -> None: ...

    async def run_training(_: Any, ledger: Any, stop: StopRequest, callbacks: object) -> Outcome:
        stop.attach(SimpleNamespace(stop=lambda grace_s: None), 1.0, lambda: None)  # type: ignore[arg-type]
        if error is not None:
            raise error
        return outcome_of(folder)

    def write_report(_: Any) -> None:
        writing.set()
        written.wait(HANG_S)

    for name, fake in [
        ("open_session", open_session),
        ("start_state", start_state),
        ("run_training", run_training),
    ]:
        patch.setattr(at_train, name, fake)
    patch.setattr("millrace.report.page.write.write_report", write_report)
    stop = StopRequest()
    task = asyncio.create_task(train(recipe.load(RECIPE), progress(), stop))
    await asyncio.to_thread(writing.wait, HANG_S)
    if not stop.request():  # as the command line does
        task.cancel()
    try:
        return await asyncio.wait_for(task, HANG_S), stop
    finally:
        written.set()


def test_a_stop_during_the_report_keeps_a_complete_run_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Progress, "note", lambda _, text: said.append(text))
    outcome, stop = asyncio.run(end_while_writing(monkeypatch, tmp_path, None))
    assert outcome.complete and outcome.report is None
    assert said == [f"stopped before the report was written: `millrace report {tmp_path}`"]
    assert not stop.request(), "there is nothing left to save"


def test_a_stop_during_the_report_keeps_the_error_of_a_failed_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(MillraceError, match="the worker died"):
        asyncio.run(end_while_writing(monkeypatch, tmp_path, MillraceError("the worker died")))
