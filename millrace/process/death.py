"""The end of a process: with its parent, at no stop signal, with its group, and by a mark.

The standard library is enough, because a sandbox uses this file before it has any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
from pathlib import Path

_OPTIONS = {
    "PR_SET_PDEATHSIG": 1,
    "PR_SET_DUMPABLE": 4,
    "PR_SET_CHILD_SUBREAPER": 36,
    "PR_SET_NO_NEW_PRIVS": 38,
}
_SET_NAME = 15
_KILL_S = 10.0
"""Seconds in which killed processes end, also on a busy machine."""

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError if a call of the C library failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: str, value: int) -> None:
    """Set an attribute of this process. Linux alone has them, elsewhere nothing happens."""
    if sys.platform == "linux":
        more = map(ctypes.c_ulong, (value, 0, 0, 0))
        check(libc.prctl(_OPTIONS[option], *more), option)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies for any reason. Linux only."""
    prctl("PR_SET_PDEATHSIG", signal.SIGKILL)
    # Another parent means that the driver is dead already. A comparison with process id 1
    # would be wrong: in a container the driver may have that id.
    if sys.platform == "linux" and os.getppid() != parent:
        os._exit(1)


def ignore_stop_signals() -> None:
    """Ignore SIGTERM, SIGINT and SIGHUP. The driver alone acts on them, and it saves first.

    systemd, Slurm and a terminal send these signals to every process of a run. A worker's own
    children inherit the setting. A worker still ends when its socket closes, when the driver
    dies, and on SIGKILL.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def show_as(name: str) -> None:
    """Give this process a name in `top`, of 15 bytes at most. Linux only."""
    if sys.platform == "linux":
        libc.prctl(_SET_NAME, name.encode())


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_group(leader: int) -> None:
    """Kill a process that leads a session, and all that is still in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Kill the processes with `mark` in their environment, also in sessions of their own.

    A process that forks meanwhile is found in a later pass. Linux alone shows environments.
    """
    end = time.monotonic() + _KILL_S
    while sys.platform == "linux" and time.monotonic() < end:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if not sum(_kill_if_marked(pid, mark) for pid in pids):
            return
        time.sleep(0.01)


def _kill_if_marked(pid: int, mark: str) -> bool:
    """Kill a process if it has the mark. A pidfd names it also if its number is used again."""
    process = None
    try:
        with contextlib.suppress(OSError):  # some kernels have no pidfd
            process = os.pidfd_open(pid)
        if mark.encode() not in Path(f"/proc/{pid}/environ").read_bytes():
            return False
        if process is None:
            os.kill(pid, signal.SIGKILL)
        else:
            signal.pidfd_send_signal(process, signal.SIGKILL)
    except OSError:  # it ended, or it is another user's
        return False
    finally:
        if process is not None:
            os.close(process)
    return True


def end_after_input(mark: str, folder: str) -> None:
    """Kill the processes with a mark and remove a folder, once the standard input is at its end.

    The process that runs this outlives the driver, which cannot hold its input open when dead.
    """
    sys.stdin.buffer.read()
    for _ in range(2):  # One may just have started.
        kill_marked(mark)
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)
