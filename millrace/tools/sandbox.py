"""A sandbox for what a model wrote: no network, no files of yours, and a limit on everything.

    namespaces   namespaces of its own, a read-only root with the system's programs alone, an empty
                 working folder in memory, no privileges, a filter of system calls
    process      the limits and the filter alone. It guards against accidents, and is no boundary

Where a trial run of the level fails, millrace refuses with the reason and the fix. It never takes a
weaker level by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import millrace
from millrace.environments.deadline import stopped
from millrace.errors import EpisodeError, MillraceError
from millrace.tools.inside import WORK

Level = Literal["namespaces", "process"]

_ROOT = str(Path(millrace.__file__).parent.parent)
_START = (
    f"import sys; sys.path.append({_ROOT!r}); from millrace.tools.inside import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]))"
)
_PIPES = (asyncio.subprocess.PIPE, asyncio.subprocess.PIPE, asyncio.subprocess.PIPE)
_TALK = (asyncio.subprocess.PIPE, asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL)
_SILENT = "its watcher ended without a word"
_GRACE_S = 5.0
"""Seconds that building the walls and ending the program may take beyond the wall limit."""
_MB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use."""

    wall_s: float = 10.0
    cpu_s: int = 10
    """Seconds of CPU time for each process."""
    memory: int = 512 * _MB
    """Bytes of address space for each process, and of memory for all of them together."""
    processes: int = 32
    """Processes and threads at once."""
    disk: int = 32 * _MB
    """Bytes of the working folder. With the level `process`, bytes of each file."""
    output: int = 1 * _MB
    """Bytes of stdout and stderr together."""
    address: int | None = None
    """Bytes of address space for each process, if that is not `memory`. -1 sets no limit."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a program ended."""

    stdout: str
    stderr: str
    status: int
    """The exit code, or minus the number of the signal that ended the program."""
    reason: str
    """"exit", "signal", or the limit: "wall", "cpu", "memory", "processes" or "output"."""
    seconds: float


class SandboxRefused(MillraceError):
    """This machine cannot isolate a program as the level promises."""

    exit_code = 2


class Running:
    """A program in the sandbox. Its pipes are open until `end`."""

    def __init__(self, process: asyncio.subprocess.Process, life: int, status: int) -> None:
        self.process = process
        self._life: int | None = life
        self._status = status

    async def end(self) -> dict[str, Any]:
        """End whatever still runs, and return the watcher's last words: empty if it has none."""
        self.release()
        try:
            await asyncio.wait_for(self.process.wait(), _GRACE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await asyncio.wait_for(self.process.wait(), _GRACE_S)
        self.process._transport.close()  # type: ignore[attr-defined]  # its pipes may be open
        line = os.read(self._status, 65536) if self._status >= 0 else b""
        with suppress(OSError):
            os.close(self._status)
        self._status = -1
        words: dict[str, Any] = json.loads(line.partition(b"\n")[0] or b"{}")
        return words

    def release(self) -> None:
        """Tell the watcher to end everything. It needs no event loop."""
        if self._life is not None:
            os.close(self._life)
            self._life = None


class Sandbox:
    """Runs programs apart from this machine. One sandbox serves a whole run."""

    def __init__(
        self,
        level: Level = "namespaces",
        limits: Limits | None = None,
        *,
        readable: Sequence[str] = (),
        python: str = "",
        concurrent: int = 0,
        instead: str = "the level `process`, which guards against accidents and is no boundary",
    ) -> None:
        """Make a sandbox.

        `readable` names more files and folders that programs may read. `python` is the interpreter
        for sources, by default this one without its virtual environment. `concurrent` bounds the
        programs at once, by default twice the cores. A refusal names what to take `instead`.
        """
        self.level = level
        self.limits = limits or Limits()
        self.python = os.path.realpath(python or getattr(sys, "_base_executable", sys.executable))
        prefix = [] if python else [os.path.realpath(sys.base_prefix)]
        self.readable = [*prefix, *readable]
        self._slots = asyncio.Semaphore(concurrent or 2 * (os.cpu_count() or 1))
        self._checked = False
        self._instead = instead

    async def check(self) -> None:
        """Make a trial run. Raises SandboxRefused with the reason and the fix."""
        if self._checked:
            return
        if sys.platform != "linux":
            raise SandboxRefused(self._refusal(f"the system is {sys.platform}, not Linux"))
        try:
            result = await self._run([self.python, "-I", "-S", "-c", "print(6 * 7)"], "", None, {})
        except EpisodeError as error:
            raise SandboxRefused(self._refusal(str(error))) from error
        if result.stdout != "42\n":
            said = result.stderr.strip()[-300:] or result.reason
            raise SandboxRefused(self._refusal(f"python in the sandbox: {said}"))
        self._checked = True

    def _refusal(self, why: str) -> str:
        fix = (
            "allow unprivileged user namespaces (sysctl user.max_user_namespaces, and on Ubuntu "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container, --privileged or a "
            f"seccomp profile that allows unshare), Linux 5.12 or newer, or {self._instead}"
        )
        if self.level == "process":
            fix = "python=PATH of an interpreter that every user may read"
        return f"sandbox level {self.level}: a trial run failed: {why}. Fix: {fix}."

    async def run(
        self,
        program: str | Sequence[str],
        stdin: str = "",
        limits: Limits | None = None,
        *,
        files: Mapping[str, str] | None = None,
    ) -> Result:
        """Run Python source, or a command, and return how it ended.

        `files` are in the working folder at the start. Raises SandboxRefused if this machine
        cannot isolate, and EpisodeError("sandbox") if the sandbox itself failed.
        """
        await self.check()
        inputs = dict(files or {})
        if isinstance(program, str):
            inputs["main.py"] = program
            program = [self.python, "-I", "-B", "main.py"]
        return await self._run(list(program), stdin, limits, inputs)

    async def open(
        self, program: Sequence[str], limits: Limits | None = None, *, files: Mapping[str, str]
    ) -> Running:
        """Start a program to talk with, over its stdin and stdout. Its stderr is dropped.

        The caller must call `end`. It holds no slot of `concurrent`.
        """
        await self.check()
        return await self._start(list(program), limits or self.limits, dict(files), _TALK)

    async def hold(
        self,
        program: Sequence[str],
        limits: Limits,
        *,
        connection: int,
        output: int,
        environment: Mapping[str, str],
    ) -> Running:
        """Start a program whose stdin is a socket. The caller reads its `output`, and calls `end`.

        `environment` comes on top of the sandbox's own. Raises EpisodeError("sandbox").
        """
        await self.check()
        streams = connection, output, output
        return await self._start(list(program), limits, {}, streams, environment=environment)

    async def _run(
        self, argv: list[str], stdin: str, limits: Limits | None, files: dict[str, str]
    ) -> Result:
        limits = limits or self.limits
        folder = self._folder()
        with stopped():
            await self._slots.acquire()
        try:
            start = time.perf_counter()
            try:
                running = await self._start(argv, limits, files, _PIPES, folder)
                outputs, reason = await _talk(running, stdin, limits)
            finally:
                if folder:
                    shutil.rmtree(folder, ignore_errors=True)
            seconds = time.perf_counter() - start
        finally:
            self._slots.release()
        words, (out, err) = outputs
        if "status" not in words and not reason:
            raise EpisodeError("sandbox", words.get("failed", _SILENT))
        status = words.get("status", -signal.SIGKILL)
        reason = reason or words.get("reason", "") or _reason(status)
        return Result(
            out.decode(errors="replace"), err.decode(errors="replace"), status, reason, seconds
        )

    def _folder(self) -> str:
        return tempfile.mkdtemp(prefix="sandbox-") if self.level == "process" else ""

    async def _start(
        self,
        argv: list[str],
        limits: Limits,
        files: dict[str, str],
        streams: tuple[int, int, int],
        folder: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Running:
        folder, (stdin, stdout, stderr) = folder or WORK, streams
        spec = {
            "level": self.level, "argv": argv, "inputs": files, "folder": folder,
            "readable": self.readable, "memory": limits.memory, "cpu": limits.cpu_s,
            "processes": limits.processes, "disk": limits.disk, "wall": limits.wall_s,
            "files": 4096, "env": _environment(folder) | dict(environment or {}),
            "address": limits.memory if limits.address is None else limits.address,
        }  # fmt: skip
        life_end, life = os.pipe()
        status, status_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _START, str(life_end), str(status_end)),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(life_end, status_end),
                start_new_session=True,
                env={},
                cwd="/",
            )
        finally:
            os.close(life_end)
            os.close(status_end)
        running = Running(process, life, status)
        line = json.dumps(spec).encode() + b"\n"
        try:
            await asyncio.wait_for(asyncio.to_thread(_write_all, life, line), _GRACE_S)
        except (TimeoutError, BrokenPipeError) as error:
            words, slow = await running.end(), isinstance(error, TimeoutError)
            told = f"it did not start within {_GRACE_S:g} s" if slow else _SILENT
            raise EpisodeError("sandbox", words.get("failed", told)) from None
        return running


def _environment(folder: str) -> dict[str, str]:
    """Return the whole environment of a program. Nothing of the driver's is in it."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _reason(status: int) -> str:
    return "cpu" if status == -signal.SIGXCPU else "signal" if status < 0 else "exit"


async def _talk(
    running: Running, stdin: str, limits: Limits
) -> tuple[tuple[dict[str, Any], tuple[bytes, bytes]], str]:
    """Send the input, read the output, and end the program.

    Return the watcher's words with the outputs, and the limit that this side noticed, or "".
    """
    kept, room, reason = (bytearray(), bytearray()), limits.output, ""
    process = running.process

    async def read(stream: asyncio.StreamReader, into: bytearray) -> None:
        nonlocal room, reason
        while piece := await stream.read(65536):
            into += piece[: max(room, 0)]
            room -= len(piece)
            if room < 0:  # the rest is read and dropped, so that the pipe closes
                reason = "output"
                running.release()

    async def write(stream: asyncio.StreamWriter) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            stream.write(stdin.encode(errors="replace"))
            await stream.drain()
        stream.close()

    assert process.stdin and process.stdout and process.stderr
    parts = [read(process.stdout, kept[0]), read(process.stderr, kept[1]), write(process.stdin)]
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        limit = limits.wall_s + _GRACE_S
        _, late = await asyncio.wait(tasks[:2], timeout=limit)
        reason = reason or ("wall" if late else "")
    finally:
        for task in tasks:
            task.cancel()
        words = await running.end()
    return (words, (bytes(kept[0]), bytes(kept[1]))), reason
