"""A sandbox for what a model wrote: no network, no files of yours, and a limit on everything.

    namespaces   namespaces of its own, a read-only root with the system's programs alone, an empty
                 working folder in memory, no privileges, a filter of system calls
    process      the limits and the filter alone. It guards against accidents, and is no boundary

Where a trial run of the level fails, millrace refuses with the reason and the fix. It never takes a
weaker level by itself.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from millrace.environments.deadline import stopped
from millrace.errors import EpisodeError, MillraceError
from millrace.tools.inside import WORK
from millrace.tools.start import SILENT, Limits, Running, start, talk

Level = Literal["namespaces", "process"]

_PIPES = (asyncio.subprocess.PIPE, asyncio.subprocess.PIPE, asyncio.subprocess.PIPE)
_TALK = (asyncio.subprocess.PIPE, asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL)


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


class Sandbox:
    """Runs programs apart from this machine. One sandbox serves a whole run."""

    def __init__(
        self,
        level: Level = "namespaces",
        limits: Limits | None = None,
        *,
        readable: Sequence[str] = (),
        python: str = "",
        instead: str = "the level `process`, which guards against accidents and is no boundary",
    ) -> None:
        """Make a sandbox.

        `readable` names more files and folders that programs may read. `python` is the interpreter
        for sources, by default this one without its virtual environment. A refusal names what to
        take `instead`. Twice as many programs as cores run at once.
        """
        self.level = level
        self.limits = limits or Limits()
        self.python = os.path.realpath(python or getattr(sys, "_base_executable", sys.executable))
        prefix = [] if python else [os.path.realpath(sys.base_prefix)]
        self.readable = [*prefix, *readable]
        self._slots = asyncio.Semaphore(2 * (os.cpu_count() or 1))
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
        return await self._run(program, stdin, limits, inputs)

    async def open(
        self,
        program: Sequence[str],
        limits: Limits,
        *,
        files: Mapping[str, str] | None = None,
        streams: tuple[int, int, int] = _TALK,
        environment: Mapping[str, str] | None = None,
    ) -> Running:
        """Start a program to talk with. Without `streams`, these are pipes, and no stderr.

        `environment` comes on top of the sandbox's own. The caller must call `end`. The program
        counts not among those at once. Raises as `run` does.
        """
        await self.check()
        spec = self._spec(program, files or {}, WORK)
        return await start(spec, limits, streams, dict(environment or {}))

    async def _run(
        self, argv: Sequence[str], stdin: str, limits: Limits | None, files: dict[str, str]
    ) -> Result:
        limits = limits or self.limits
        with stopped():
            await self._slots.acquire()
        begun = time.perf_counter()
        folder = tempfile.mkdtemp(prefix="sandbox-") if self.level == "process" else WORK
        try:
            running = await start(self._spec(argv, files, folder), limits, _PIPES, {})
            words, (out, err), reason = await talk(running, stdin, limits)
        finally:
            self._slots.release()
            if folder != WORK:
                shutil.rmtree(folder, ignore_errors=True)
        seconds = time.perf_counter() - begun
        if "status" not in words and not reason:
            raise EpisodeError("sandbox", words.get("failed", SILENT))
        status = words.get("status", -signal.SIGKILL)
        reason = reason or words.get("reason", "") or _reason(status)
        return Result(
            out.decode(errors="replace"), err.decode(errors="replace"), status, reason, seconds
        )

    def _spec(self, argv: Sequence[str], files: Mapping[str, str], folder: str) -> dict[str, Any]:
        what = {"argv": list(argv), "inputs": dict(files), "folder": folder}
        return {**what, "level": self.level, "readable": self.readable}


def _reason(status: int) -> str:
    return "cpu" if status == -signal.SIGXCPU else "signal" if status < 0 else "exit"
