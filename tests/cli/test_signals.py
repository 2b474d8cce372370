"""Stop signals, and standard streams that close during a run."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from millrace import __main__ as entry
from millrace.cli import main
from millrace.cli.console import open_console
from millrace.observe.progress import Lines, Progress
from millrace.run import signals, supervised


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(signals, "_stopped_by", None)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup starts the tests without it
    yield
    signal.signal(signal.SIGHUP, before)


def run(*numbers: signal.Signals) -> int:
    """Send the signals to a command that saves. Returns how often it was asked to stop."""
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return True

    async def work() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)

    with Progress(Lines(Console(quiet=True)), "a", "b") as progress:
        asyncio.run(signals.with_signals(work(), progress, stop))
    return len(asked)


def test_a_closed_terminal_saves_once_and_a_second_signal_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    assert run(signal.SIGHUP, signal.SIGHUP) == 1
    assert signals.signal_exit_code() == 129 and not ended
    run(signal.SIGHUP, signal.SIGTERM)
    assert ended == [143]


def test_a_signal_that_reaches_driver_and_supervisor_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(supervised, "channel", lambda: theirs)
    ours.send(bytes([signal.SIGINT]))
    assert run(signal.SIGINT) == 1 and not ended
    ours.send(bytes([signal.SIGINT] * 2))
    run(signal.SIGINT)
    assert ended[:1] == [130], "the second one ends the process"


def test_the_death_of_the_supervisor_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(supervised, "channel", lambda: theirs)
    ours.close()
    assert run(signal.SIGCONT) == 1 and signals.signal_exit_code() == 143


def test_nohup_keeps_a_run_alive() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert run(signal.SIGHUP) == 0 and signals.signal_exit_code() is None


def test_a_run_continues_without_a_reader_of_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        out = open_console(json_=False)
        for _ in range(2):
            out.print("version 1")


def test_ctrl_c_outside_of_a_run_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "configure", interrupted)
    monkeypatch.setattr("sys.argv", ["millrace", "train", "quickstart", "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err.endswith("error: stopped by Ctrl-C\n")


def test_ctrl_c_while_the_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.__import__", interrupted)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    monkeypatch.undo()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "error: stopped by Ctrl-C\n"


def test_a_command_that_leaves_a_thread_at_work_does_not_end_it_by_force() -> None:
    script = """
import sys, threading, time
from millrace import __main__ as entry
from millrace.cli import main
class PythonsEnd:
    def __del__(self): print("Python's end")
end = PythonsEnd()
def command():
    print("done")
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    sys.exit(143)
main.main = command
entry.main()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (143, "done\n")
