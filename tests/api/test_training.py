"""Runs from Python that do not go straight to their end: Ctrl-C, errors, deadlines."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest

import millrace
from millrace.errors import ConfigError
from tests.api.small import ROWS, SMALL
from tests.e2e.runs import ROOT

INTERRUPTED = """
import asyncio, json, os, signal, sys
sys.path.insert(0, sys.argv[1])
from small import SMALL
import millrace

def press(version):
    if version.number == 1:
        os.kill(os.getpid(), signal.SIGINT)

def train():
    handler = lambda *given: None
    signal.signal(signal.SIGTERM, handler)
    try:
        millrace.train("quickstart", callbacks=[press], **SMALL)
    except KeyboardInterrupt as error:
        assert signal.getsignal(signal.SIGTERM) is handler
        print(json.dumps(str(error)))

async def main():  # as in a notebook
    train()

train()
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))


def test_ctrl_c_saves_and_is_raised_in_a_script_and_in_an_event_loop(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", INTERRUPTED, str(Path(__file__).parent)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("quickstart-1", "quickstart-2"):
        assert any("resume with" in line and name in line for line in done.stdout.splitlines())
        run = millrace.Run(tmp_path / "runs" / name)
        assert not run.complete and run.checkpoint is not None and len(run.metrics) < 4


def test_an_error_of_a_callback_ends_the_run_after_a_checkpoint(tmp_path: Path) -> None:
    def fails(version: millrace.LiveVersion) -> None:
        raise ValueError(f"not this row: {version.number}")

    with pytest.raises(millrace.CallbackError, match=r"callback fails raised at version 1: Value"):
        millrace.train("quickstart", callbacks=[fails], progress=False, **SMALL)
    run = millrace.Run(tmp_path / "runs" / "quickstart-1")
    assert run.checkpoint is not None and not run.complete


def test_a_rate_that_is_none_is_refused() -> None:
    rates: list[Any] = [-1.0, float("nan"), "1e-4", True]

    def sets(version: millrace.LiveVersion) -> None:
        for rate in rates:
            with pytest.raises(ConfigError, match="set_lr"):
                version.set_lr(rate)
        version.set_lr(numpy.float32(0.25))  # such as a schedule of numpy gives
        assert version.lr == 0.25
        version.stop()

    assert millrace.train("quickstart", callbacks=[sets], progress=False, **SMALL).metrics


def test_a_call_that_hangs_is_an_error_and_its_thread_is_abandoned(
    capfd: pytest.CaptureFixture[str],
) -> None:
    hangs, free = [True], threading.Event()

    def reward(solution_str: str, **columns: Any) -> float:
        if hangs:
            hangs.clear()
            free.wait(120)
        return 1.0

    keys = {"timeout_s": 1.0, "trial": False, "max_error_share": 1.0, "retries": 0}
    run = millrace.train("quickstart", reward={"function": reward, **keys}, train=ROWS, **SMALL)
    free.set()
    assert run.complete and sum(
        row.get("reward/function/failures/timeout", 0) for row in run.metrics
    )
    assert "its thread was abandoned" in capfd.readouterr().out


def test_a_coroutine_scores_in_the_driver() -> None:
    threads = set[str]()

    async def reward(solution_str: str, **columns: Any) -> dict[str, float]:
        threads.add(threading.current_thread().name)
        return {"score": len(solution_str), "half": 0.5}

    run = millrace.train("quickstart", reward=reward, train=ROWS, progress=False, **SMALL)
    assert run.complete and threads == {"reward worker"}
    assert dict(run.samples(1)[0]["components"]) == {"half": 0.5}


def test_a_resume_refuses_other_rows_and_takes_the_same(tmp_path: Path) -> None:
    def stops(version: millrace.LiveVersion) -> None:
        version.stop()

    def reward(solution_str: str, **columns: Any) -> float:
        return 1.0

    keys: dict[str, Any] = SMALL | {"reward": reward, "progress": False}
    run = millrace.train("quickstart", train=ROWS, callbacks=[stops], **keys)
    keys |= {"trainer.resume": "auto", "trainer.run_dir": str(run.folder)}
    with pytest.raises(ConfigError, match=r"data\.train_files"):
        millrace.train("quickstart", train=ROWS[:-3], **keys)
    assert millrace.train("quickstart", train=[*ROWS], **keys).complete
    with pytest.raises(ConfigError, match=r"millrace\.driver:reward.*no file has it"):
        millrace.train(
            run.folder / "config.yaml", **{"trainer.run_dir": "", "trainer.resume": "never"}
        )
