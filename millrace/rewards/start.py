"""The start of a worker's process, and the end of all that it started.

A worker is a process of its own, or one in a sandbox. The pool sees a Body of either.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

import millrace
from millrace.rewards.wire import Job

_MARK = "MILLRACE_REWARD_WORKER"
"""The variable by which a process is known that left its worker's group."""
_PASSES = 20


class Body(Protocol):
    """A started worker."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """Begin to end the worker and what it started. It does not wait."""
        ...

    async def ended(self) -> str:
        """Wait until nothing of the worker runs, and return how it ended."""
        ...


class Launcher(Protocol):
    """Starts workers."""

    async def check(self) -> None:
        """Raise ConfigError if no worker can be started here."""
        ...

    async def start(
        self, job: Job, connection: int, output: int, environment: Mapping[str, str]
    ) -> Body:
        """Start a worker. Raise OSError if that fails.

        `connection` is its end of the socket, and `output` its stdout and stderr.
        """
        ...


def arguments(connection: int, parent: int, job: Job) -> Sequence[str]:
    """Return the arguments of Python that start a worker."""
    text = msgspec.json.encode(job).decode()
    return "-m", "millrace.rewards.worker", str(connection), str(parent), text


class Plain:
    """Starts workers as processes of the user."""

    async def check(self) -> None:
        return None

    async def start(
        self, job: Job, connection: int, output: int, environment: Mapping[str, str]
    ) -> Body:
        root = str(Path(millrace.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        mark = secrets.token_hex(16)
        process = subprocess.Popen(
            [sys.executable, *arguments(connection, os.getpid(), job)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(connection,),
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1"}
            | os.environ
            | dict(environment)
            | {"PYTHONPATH": path, _MARK: mark},
        )
        return _Process(process, mark)


class _Process:
    def __init__(self, process: subprocess.Popen[bytes], mark: str) -> None:
        self._process, self._mark = process, mark
        self.pid = process.pid

    def kill(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def ended(self) -> str:
        code = await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(_end_strays, self._mark)
        return how(code)


def how(code: int) -> str:
    """Return how a process ended, from its exit code or minus its signal."""
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"


def _end_strays(mark: str) -> None:
    """Kill every process that has the mark in its environment, also one with a session of its own.

    A process that forks meanwhile is found in a later pass.
    """
    if sys.platform != "linux":
        return
    for _ in range(_PASSES):
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if not sum(_end_marked(pid, mark) for pid in pids):
            return


def _end_marked(pid: int, mark: str) -> bool:
    """Kill a process if it has the mark. A pidfd names it also if its number is used again."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        found = f"{_MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        if found:
            signal.pidfd_send_signal(process, signal.SIGKILL)
    except OSError:  # it ended, or it is another user's
        return False
    finally:
        os.close(process)
    return found
