"""`millrace watch` as a command: its arguments, and its end in a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.report.folders import Run
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[2]


def test_without_a_folder_it_shows_the_newest_run(run: Callable[..., Any], tmp_path: Path) -> None:
    for name, when in (("a", 1.2e9), ("b", 1e9)):
        made = Run(tmp_path / "runs" / name)
        made.version(1)
        made.end(1, complete=True)
        os.utime(made.path / ".lock", (when, when))
    (tmp_path / "runs" / "an-evaluation").mkdir()
    code, out, err = run("watch")
    assert (code, err) == (0, "") and "runs/a" in out and "complete" in out


def test_json_has_the_figures(run: Callable[..., Any], tmp_path: Path) -> None:
    made = Run(tmp_path / "run")
    made.version(1)
    made.end(1, complete=True)
    code, out, _ = run("watch", str(made.path), "--json")
    look = json.loads(out)
    assert code == 0 and look["state"] == "complete" and look["versions"] == 80
    assert look["rewards"] == [0.01] and "no accounts" in look["advice"][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing"], "RUN = 'missing': no such folder"),
        (["file"], "RUN = 'file': is a file"),
        (["folder"], "is not the folder of a run"),
        ([], "has no run. Fix: a folder such as"),
    ],
)
@pytest.mark.parametrize("command", ["watch", "serve"])
def test_what_is_no_run_is_refused(
    run: Callable[..., Any], tmp_path: Path, command: str, arguments: list[str], said: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    code, _, err = run(command, *arguments)
    assert code == 2 and said in err


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *words: str) -> None:
        ours, theirs = pty.openpty()
        env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
        command = [sys.executable, "-m", "millrace", *words]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        os.close(theirs)
        self._ours, self._text = ours, b""
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # the other end is closed
                return
            with self._more:
                self._text += data
                self._more.notify_all()

    def until(self, text: str) -> None:
        with self._more:
            assert self._more.wait_for(lambda: text in self._text.decode(errors="replace"), HANG_S)

    def end(self) -> tuple[int, str]:
        """Wait for the end. Returns the exit code and what stays on the terminal."""
        code = self.process.wait(HANG_S)
        self._thread.join(HANG_S)
        os.close(self._ours)
        text = self._text.decode(errors="replace")
        assert text.count("\x1b[?25l") == text.count("\x1b[?25h"), "the cursor is shown again"
        return code, text.rpartition("\x1b[?1049l")[2]


def test_ctrl_c_ends_the_view_and_not_the_run(tmp_path: Path) -> None:
    made = Run(tmp_path / "run")
    made.version(1)
    files = sorted(made.path.rglob("*"))
    terminal = Terminal("watch", str(made.path), "--interval", "0.2")
    terminal.until("version 1 of 80")
    made.version(2)
    terminal.until("version 2 of 80")
    terminal.process.send_signal(signal.SIGINT)
    code, left = terminal.end()
    made.close()
    assert code == 0 and "version 2 of 80" in left
    assert sorted(made.path.rglob("*")) == files


def test_the_view_ends_with_the_run(tmp_path: Path) -> None:
    made = Run(tmp_path / "run")
    made.version(1)
    terminal = Terminal("watch", str(made.path), "--interval", "0.2")
    terminal.until("running")
    made.end(1, complete=True)
    code, left = terminal.end()
    assert code == 0 and "complete" in left
