"""Reward functions in the sandbox that the tools of agents have."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

import millrace
from millrace.errors import ConfigError, EpisodeError, bad_value
from millrace.rewards.start import ProcessHandle, arguments, how
from millrace.rewards.wire import Job

if TYPE_CHECKING:
    from millrace.tools.start import Running

_PROCESSES = 64
_FOR_EVER = 10**9
_PACKAGES = ("site-packages", "dist-packages")


class SandboxLauncher:
    """Starts the workers of one reward in a sandbox. The pool ends them by their deadlines."""

    def __init__(self, section: str, function: str) -> None:
        """`section` is the section of the reward, and `function` its key."""
        from millrace.tools.sandbox import Sandbox

        self._key, self._function = f"{section}.sandbox", function
        packages = [
            str(p.resolve()) for p in map(Path, sys.path) if p.name in _PACKAGES and p.is_dir()
        ]
        package = Path(millrace.__file__).resolve().parent
        own = [str(path) for path in _places(function)]
        self._paths = [*packages, str(package.parent), *(str(Path(p).parent) for p in own)]
        self._own = own
        self._sandbox = Sandbox(
            readable=[*packages, str(package), *own],
            instead=f"{self._key}=false, which runs the function as you and with your rights",
        )

    async def check(self) -> None:
        """Make a trial run. Raise ConfigError if this machine cannot isolate the function."""
        from millrace.tools.sandbox import SandboxRefused

        for place in self._own:
            if os.geteuid() == 0 and not os.stat(place).st_mode & 0o004:
                rule = f"a user without rights runs the function, and cannot read {place}"
                raise bad_value(self._key, True, rule, f"chmod -R o+rX {place}")
        try:
            await self._sandbox.check()
        except SandboxRefused as refused:
            raise ConfigError(f"{self._key} = True: the reward cannot run: {refused}") from refused

    async def start(
        self, job: Job, connection: int, output: int, environment: Mapping[str, str]
    ) -> ProcessHandle:
        from millrace.tools.start import Limits

        memory = job.memory_mb << 20 or psutil.virtual_memory().total
        limits = Limits(_FOR_EVER, _FOR_EVER, memory, _PROCESSES, address=-1)
        where, _, name = self._function.rpartition(":")
        if where.endswith(".py"):  # the sandbox has another current folder
            path = Path(where).expanduser().resolve()
            job = msgspec.structs.replace(job, spec=job.spec | {"function": f"{path}:{name}"})
        program = [self._sandbox.python, "-s", "-B", *arguments(0, 0, job)]
        variables = {"PYTHONPATH": os.pathsep.join(self._paths)}
        try:
            running = await self._sandbox.open(
                program, limits, streams=(connection, output, output), environment=variables
            )
        except EpisodeError as error:
            raise OSError(str(error)) from error
        return _Isolated(running, job)


class _Isolated:
    def __init__(self, running: Running, job: Job) -> None:
        self._running, self._job = running, job
        self.pid: int = running.process.pid

    def kill(self) -> None:
        self._running.release()

    async def ended(self) -> str:
        words = await self._running.end()
        return _how(words, self._job)


def _how(words: Mapping[str, Any], job: Job) -> str:
    """Return how a worker ended, in the words of the sandbox's watcher."""
    if "failed" in words:
        return f"a sandbox that did not start ({words['failed']})"
    if words.get("reason") == "memory":
        return f"more memory than {job.key}.memory_mb = {job.memory_mb}"
    if words.get("reason") == "processes":
        return f"more than {_PROCESSES} processes"
    return how(words.get("status", -signal.SIGKILL))


def _places(function: str) -> Iterator[Path]:
    """Yield the folder or the package of a user's function. A built-in one has none."""
    where, colon, _ = function.rpartition(":")
    if where.endswith(".py"):
        yield Path(where).expanduser().resolve().parent
    elif colon:
        # `python -m`, which starts a worker, looks in the current folder too.
        found = PathFinder.find_spec(where.partition(".")[0], [os.getcwd(), *sys.path])
        origin = [found.origin] if found and found.origin else []
        for place in (found.submodule_search_locations or origin) if found else ():
            if Path(place).exists():
                yield Path(place).resolve()
