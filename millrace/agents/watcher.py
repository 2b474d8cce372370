"""A process that outlives the driver, and ends the programs that the driver leaves.

It waits for the end of its input, which a dead driver cannot hold open. Then it kills each process
whose environment has the run's mark, in whatever process group or session, and removes the folder
of their tasks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "MILLRACE_AGENTS"
"""The variable that each program of a run has, and each process that it starts."""
_KILL_S = 10.0
"""Seconds in which killed processes end, also on a busy machine."""


def marked(text: str) -> list[int]:
    """Return the ids of the processes with `text` in their environment. Linux alone has them."""
    found, wanted = [], text.encode()
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdigit() and int(name) != os.getpid():
            # It ended, it belongs to somebody else, or it is a zombie.
            with contextlib.suppress(OSError):
                if wanted in Path("/proc", name, "environ").read_bytes():
                    found.append(int(name))
    return found


def kill_marked(text: str) -> None:
    """Kill the processes with `text` in their environment, until there are none."""
    end = time.monotonic() + _KILL_S
    while (left := marked(text)) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def start(mark: str, folder: str) -> subprocess.Popen[bytes]:
    """Start the watcher. Close its stdin to end it, and the programs and the folder with it."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env={},
        cwd="/",
    )


if __name__ == "__main__":
    sys.stdin.buffer.read()
    for _ in range(2):  # One may just have started.
        kill_marked(f"{MARK}={sys.argv[1]}")
        time.sleep(0.02)
    shutil.rmtree(sys.argv[2], ignore_errors=True)
