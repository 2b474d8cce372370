"""The start of a worker's process, and the end of all that it started.

A worker is a process of its own, one in a sandbox, or a thread of the driver. The pool sees a handle
of each.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from millrace.process.death import kill_group, kill_marked
from millrace.process.spawn import ROOT, spawn
from millrace.rewards.wire import Job

_MARK = "MILLRACE_REWARD_WORKER"
"""The variable by which a process is known that left its worker's group."""


class ProcessHandle(Protocol):
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
        return

    async def start(
        self, job: Job, connection: int, output: int, environment: Mapping[str, str]
    ) -> ProcessHandle:
        """Start a worker. Raise OSError if that fails.

        `connection` is its end of the socket, and `output` its stdout and stderr.
        """
        ...


def arguments(connection: int, parent: int, job: Job) -> Sequence[str]:
    """Return the arguments of Python that start a worker."""
    text = msgspec.json.encode(job).decode()
    return "-m", "millrace.rewards.worker", str(connection), str(parent), text


class LocalLauncher(Launcher):
    """Starts workers as processes of the user."""

    async def start(
        self, job: Job, connection: int, output: int, environment: Mapping[str, str]
    ) -> ProcessHandle:
        path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
        mark = secrets.token_hex(16)
        own = {"PYTHONPATH": path, _MARK: mark}
        variables = {"OMP_NUM_THREADS": "1"} | os.environ | dict(environment) | own
        command = [sys.executable, *arguments(connection, os.getpid(), job)]
        return _Process(spawn(command, variables, output, fds=[connection]), mark)


class DriverLauncher(Launcher):
    """Starts workers as threads of this process, for a function that exists only here.

    A thread cannot be killed. One that misses its deadline is abandoned, and another takes its place.
    """

    async def start(
        self, job: Job, connection: int, output: int, environment: Mapping[str, str]
    ) -> ProcessHandle:
        return _Thread(socket.socket(fileno=os.dup(connection)), job)


class _Thread:
    def __init__(self, connection: socket.socket, job: Job) -> None:
        self.pid = os.getpid()
        self._connection = connection
        name = f"{job.key} worker"
        threading.Thread(target=self._run, args=(job,), name=name, daemon=True).start()

    def _run(self, job: Job) -> None:
        from millrace.rewards.worker import serve

        with self._connection, suppress(OSError):  # nobody waits for its answer any more
            serve(self._connection, job)

    def kill(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    async def ended(self) -> str:
        return "no end: it is a thread"


class _Process:
    def __init__(self, process: subprocess.Popen[bytes], mark: str) -> None:
        self._process, self._mark = process, mark
        self.pid = process.pid

    def kill(self) -> None:
        if self._process.returncode is None:
            kill_group(self.pid)

    async def ended(self) -> str:
        code = await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(kill_marked, f"{_MARK}={self._mark}")
        return how(code)


def how(code: int) -> str:
    """Return how a process ended, from its exit code or minus its signal."""
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
