"""`millrace why`, and the watch that reports a stall and may end the run."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.cli.main import app
from millrace.config import TrainerConfig
from millrace.errors import DeadlineError
from millrace.run.stall import watched
from millrace.waits import ask as asking
from millrace.waits.registry import PROCESS, acting, count, waiting
from millrace.waits.wait_server import FOLDER
from tests.report.folders import Run
from tests.waiting import HANG_S


def why(run: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["why", str(run), *options])
    return result.exit_code, result.stdout


AT_ONCE = """
import importlib, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import msgspec
from millrace.waits import answer, ask, wait_server as side

def serve(server, data):
    while True:
        with server.accept()[0] as connection:
            connection.sendall(data)

run = Path(sys.argv[1])
(run / side.FOLDER).mkdir()
server, told = side.listen(run / side.FOLDER / "x.sock"), {"name": "x", "pid": 1, "host": "here"}
data = msgspec.json.encode([answer.ProcessStatus("x", 1, "here")])
threading.Thread(target=serve, args=(server, data), daemon=True).start()
sys.setswitchinterval(1e-6)
for _ in range(200):
    importlib.reload(answer)
    importlib.reload(ask)
    with ThreadPoolExecutor(8) as pool:
        assert all(one[0].name == "x" for one in pool.map(lambda k: ask.ask_one(run, told), range(8)))
"""


def test_answers_that_come_at_once_do_not_crash_the_process(tmp_path: Path) -> None:
    """msgspec crashes where threads decode a type for the first time. New modules have new types."""
    subprocess.run([sys.executable, "-c", AT_ONCE, str(tmp_path)], check=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "DEADLINE_S", HANG_S)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / ".millrace-run").touch()
    (tmp_path / "metrics.jsonl").touch()
    PROCESS.counts.clear()
    PROCESS.gauges.clear()
    return tmp_path


def test_a_stall_is_reported_saved_and_ends_the_run_if_it_should(run_dir: Path) -> None:
    notes: list[str] = []

    async def run() -> None:
        config = TrainerConfig(stall_s=0.5, on_stall="stop")
        async with watched(run_dir, config, notes.append):
            with acting("trainer"), waiting("tool search", "a call"):
                await asyncio.sleep(10_000)

    with pytest.raises(DeadlineError, match=r"tool search has not finished a call for .*on_stall"):
        asyncio.run(run())
    (note,) = notes
    (text,) = run_dir.glob("stall-*.txt")
    assert note.startswith("stall: nothing has moved for trainer.stall_s = 0.5 s: tool search")
    assert str(text) in note and "tool search has not finished" in text.read_text()
    verdict = json.loads(text.with_suffix(".json").read_text())
    assert verdict["culprit"] == "tool search" and verdict["answers"][0]["stacks"]
    assert not (run_dir / FOLDER).exists(), "nothing is left that says that the run lives"


def test_a_run_that_only_reports_goes_on(run_dir: Path) -> None:
    async def run() -> None:
        loop, noted = asyncio.get_running_loop(), asyncio.Event()

        def note(text: str) -> None:
            loop.call_soon_threadsafe(noted.set)

        async with watched(run_dir, TrainerConfig(stall_s=0.3), note):
            with waiting("tool search", "a call"):
                async with asyncio.timeout(HANG_S):
                    await noted.wait()
                code, said = await asyncio.to_thread(why, run_dir, "--patience", "0.1")
                assert code == 1 and said.startswith("tool search has not finished a call")
                assert "Next: " in said
            code, said = 1, ""
            while code:  # a busy machine may stand still between the two
                count("moves")
                code, said = await asyncio.to_thread(why, run_dir, "--json")
            assert json.loads(said)["state"] == "moving"

    asyncio.run(run())


def test_a_run_without_processes_is_over(run_dir: Path) -> None:
    assert why(run_dir) == (0, "no process of the run is there: it stopped, or it has not begun.\n")
    stopped = Run(run_dir.parent / "stopped")
    stopped.version(1)
    stopped.end(1, False)
    code, said = why(stopped.path)
    assert code == 0 and "the run was stopped at version 1." in said
    assert "trainer.resume=auto" in said


def test_a_driver_that_was_killed_is_dead(run_dir: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    (run_dir / FOLDER).mkdir()
    about: dict[str, Any] = {"name": "driver", "pid": process.pid, "host": socket.gethostname()}
    (run_dir / FOLDER / "driver.json").write_text(json.dumps(about))
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "trainer-0.log").write_text("CUDA error: out of memory\n")
    code, said = why(run_dir)
    assert code == 1 and f"the driver (process {process.pid}) died without an end" in said
    assert "trainer-0.log: CUDA error" in said and "trainer.resume=auto" in said
    about |= {"host": "another-node", "pid": os.getpid()}
    (run_dir / FOLDER / "driver.json").write_text(json.dumps(about))
    assert "run `millrace why" in why(run_dir)[1]


def test_a_process_that_imports_torch_answers(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millrace.waits import answer
    from millrace.waits.ask import ask

    def broken() -> list[str]:
        raise RuntimeError("cannot be read")

    async def work() -> None:
        async with watched(run_dir, TrainerConfig(), lambda text: None):
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, "torch", ModuleType("torch"))
                (said,) = await asyncio.to_thread(ask, run_dir)
                assert not said.silent
            with monkeypatch.context() as patch:
                patch.setattr(answer, "flight_recorder", broken)
                (said,) = await asyncio.to_thread(ask, run_dir)
                assert said.silent
            (said,) = await asyncio.to_thread(ask, run_dir)
            assert not said.silent

    asyncio.run(work())


def test_a_run_that_starts_is_not_called_over(tmp_path: Path) -> None:
    made = Run(tmp_path / "made")
    (made.path / "history.jsonl").unlink()
    code, said = why(made.path)
    assert code == 0 and "the run starts" in said
    assert f"process {os.getpid()} of this machine is running" in said
    made.close()


def test_a_folder_of_no_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["why", str(tmp_path)])
    assert "is not the folder of a run" in str(result.exception)


def test_only_the_user_may_ask_and_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    run = tmp_path / ("long" * 40) / "r"
    run.mkdir(parents=True)

    async def work() -> None:
        async with watched(run, TrainerConfig(), lambda text: None):
            folder = run / FOLDER
            assert folder.stat().st_mode & 0o777 == 0o700
            assert (folder / "driver.sock").stat().st_mode & 0o777 == 0o600
            from millrace.waits.ask import ask

            (answer,) = await asyncio.to_thread(ask, run)
            assert answer.name == "driver" and not answer.silent and answer.stacks

    asyncio.run(work())
