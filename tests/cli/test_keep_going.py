"""The supervisor of `millrace train --keep-going`: which ends it restarts, and how."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from millrace.cli.keep_going import Supervisor
from millrace.errors import MillraceError
from tests.waiting import until, until_async

DRIVER = """
import json, os, signal, socket, subprocess, sys, time
channel = socket.socket(fileno=int(os.environ["MILLRACE_SUPERVISOR"]))
folder, acts = sys.argv[1], json.loads(sys.argv[2])
with open(folder + "/starts", "a") as file:
    file.write(json.dumps([time.time(), os.environ.get("MILLRACE_RESTARTED", ""), sys.argv[3:]]) + "\\n")
turn = len(open(folder + "/starts").readlines())
act = acts[min(turn, len(acts)) - 1]

def tell(**news):
    channel.sendall(json.dumps(news).encode() + b"\\n")

for word in act.split():
    name, _, value = word.partition("=")
    if name == "run":
        tell(run=folder)
    elif name == "attempt":
        tell(attempt=turn, version=int(value))
    elif name == "version":
        with open(folder + "/history.jsonl", "a") as file:
            line = {"event": "version", "attempt": turn, "version": int(value)}
            file.write(json.dumps(line) + "\\n")
    elif name == "checkpoint":
        os.makedirs(folder + "/checkpoints/version-" + value.zfill(6))
    elif name == "worker":
        subprocess.Popen(["sleep", value], start_new_session=True)
    elif name == "error":
        tell(error=value)
    elif name == "print":
        print(value, flush=True)
    elif name == "stops":
        number = channel.recv(1)[0]
        tell(error=f"got {number}")
        sys.exit(128 + number)
    elif name == "kill":
        os.kill(os.getpid(), int(value))
    elif name == "exit":
        sys.exit(int(value))
"""


@pytest.fixture(autouse=True)
def _no_subreaper() -> Iterator[None]:
    """Let orphans of later tests go to the system again."""
    yield
    ctypes.CDLL(None).prctl(36, 0)


def supervised(folder: Path, *acts: str, restarts: int = 5, resume: str = "never") -> Supervisor:
    """Return the supervisor of drivers that act as told, one after the other."""
    return Supervisor(
        [str(folder), json.dumps(acts)],
        resume,
        restarts,
        json_=True,
        command=(sys.executable, "-S", "-c", DRIVER),
        first_s=0.01,
        leave_s=0.3,
    )


def starts(folder: Path) -> list[tuple[float, str, list[str]]]:
    """Return for each start when it was, why, and the overrides."""
    return [tuple(json.loads(line)) for line in (folder / "starts").read_text().splitlines()]


def run(supervisor: Supervisor) -> int:
    try:
        return asyncio.run(supervisor.run())
    except MillraceError as error:
        raise SystemExit(f"{error.exit_code}: {error}") from None


def test_processes_that_were_there_before_are_left_alone(tmp_path: Path) -> None:
    """A Python program may call the command, and have children of its own."""
    with (
        subprocess.Popen(["true"]) as ended,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as living,
    ):
        until(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
        assert run(supervised(tmp_path, "kill=9", "run exit=0")) == 0
        assert living.poll() is None
        assert os.waitpid(ended.pid, 0)[0] == ended.pid, "nobody else reaped it"
        assert living.stdin is not None
        living.stdin.close()


@pytest.mark.parametrize("code", [0, 2, 130, 143])
def test_an_end_that_a_restart_cannot_mend_is_the_end_of_the_command(
    tmp_path: Path, code: int
) -> None:
    assert run(supervised(tmp_path, f"run exit={code}")) == code
    assert len(starts(tmp_path)) == 1


def test_a_driver_that_dies_or_fails_is_started_anew_in_the_folder_of_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    acts = ["kill=9", "run print=1 error=why exit=1", "run attempt=0 print=2 exit=0"]
    assert run(supervised(tmp_path, *acts)) == 0
    resumed = [f"trainer.run_dir={json.dumps(str(tmp_path))}", "trainer.resume=auto"]
    assert [(why, overrides) for _, why, overrides in starts(tmp_path)] == [
        ("", []),
        ("the driver was killed by SIGKILL", []),
        ("the driver failed: why", resumed),
    ]
    captured = capsys.readouterr()
    assert captured.out == "2\n", "with --json, standard output has the last object alone"
    told = captured.err.replace("\n", " ")
    assert "keep-going: the driver was killed by SIGKILL; restart 1 of 5 in 0.01 s" in told
    assert "keep-going: the driver failed: why; restart 2 of 5 of " in told


def test_restarts_without_a_new_version_are_bounded_and_progress_counts_anew(
    tmp_path: Path,
) -> None:
    acts = ["run attempt=3 version=4 kill=9", "run version=4 kill=9", "run version=6 exit=1"]
    with pytest.raises(SystemExit, match=r"^1: the driver failed; given up after 2 restarts"):
        run(supervised(tmp_path, *acts, "run version=5 exit=1", restarts=2))
    assert len(starts(tmp_path)) == 5, "the first failure, one restart, progress, two restarts"
    (tmp_path / "starts").unlink()
    with pytest.raises(SystemExit, match=r"^139: the driver was killed by SIGSEGV; given up"):
        run(supervised(tmp_path, "kill=11", restarts=1))


@pytest.mark.parametrize(
    ("act", "resume"),
    [
        ("run kill=9", "a/version-000003"),
        ("run checkpoint=9 kill=9", "a/version-000003"),
        ("run attempt=3 kill=9", "a/version-000003"),
        ("run checkpoint=4 attempt=3 kill=9", "auto"),
    ],
)
def test_a_checkpoint_that_the_user_named_counts_until_the_run_has_its_own(
    tmp_path: Path, act: str, resume: str
) -> None:
    assert run(supervised(tmp_path, act, "exit=0", resume="a/version-000003")) == 0
    assert starts(tmp_path)[1][2][1] == f"trainer.resume={resume}"


def test_a_restart_waits_for_the_workers_of_the_dead_driver(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = psutil.Process().children()  # what other tests left
    assert run(supervised(tmp_path, "worker=0.2 kill=9", "worker=10000 exit=1", "exit=0")) == 0
    first, second, third = (at for at, *_ in starts(tmp_path))
    assert second - first > 0.2 and third - second > 0.3
    assert "killing what the dead driver left: sleep (process" in capsys.readouterr().err
    assert not set(psutil.Process().children()) - set(before)


def stop(supervisor: Supervisor, ready: Callable[[], bool]) -> int:
    """Stop the supervisor once it is `ready`."""

    async def work() -> int:
        task = asyncio.ensure_future(supervisor.run())
        await until_async(ready)
        os.kill(os.getpid(), signal.SIGTERM)
        return await task

    return asyncio.run(work())


def test_a_stop_is_passed_on_and_ends_the_command(tmp_path: Path) -> None:
    begun = tmp_path / "starts"
    assert stop(supervised(tmp_path, "stops"), begun.exists) == 143
    begun.unlink()
    waits = supervised(tmp_path, "exit=1")
    waits.first_s = 10_000
    with pytest.raises(MillraceError, match="stopped by SIGTERM before the restart") as error:
        stop(waits, lambda: begun.exists() and waits._driver is None)
    assert error.value.exit_code == 143 and len(starts(tmp_path)) == 1


def test_the_supervisor_loads_no_torch() -> None:
    code = "import sys, millrace.cli.main; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
