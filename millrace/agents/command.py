"""Agent programs with a process of their own for each episode.

The process is the leader of a new session. At its deadline, and when it ends, its whole process
group is killed. It gets a clean environment: no key of the user, unless agents.env names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from millrace.agents import watcher
from millrace.agents.programs import Task
from millrace.errors import EpisodeError, bad_value

PASSED = (
    *("PATH", "HOME", "USER", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
    *("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""The variables of the user that every program gets."""

MOST_LINE = 64 * 2**10
"""Bytes of one line of output. A longer line is left out, with a mark."""
_LAST_LINES = 20
_DRAIN_S = 1.0
"""Seconds for what is left of the output, after the program has ended."""
_CLOSE_S = 30.0
_POLL_S = 0.2


def argv_of(command: str, env: Sequence[str] = ()) -> list[str]:
    """Return the program and its arguments. Raises ConfigError if it or a variable is missing."""
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise bad_value(
            "agents.command", command, f"cannot be split: {error}", "close the quote"
        ) from None
    if not argv or shutil.which(argv[0]) is None:
        rule = f"there is no program {argv[0] if argv else ''!r} on PATH"
        raise bad_value("agents.command", command, rule, "such as `python my_agent.py`")
    missing = [name for name in env if name not in os.environ]
    if missing:
        raise bad_value("agents.env", missing[0], "is not set", "set it, or leave it out")
    return argv


class CommandProgram:
    """Runs a command for each episode, at most `concurrent` at once."""

    def __init__(
        self, command: str, url: Callable[[], str], *, concurrent: int, env: Sequence[str] = ()
    ) -> None:
        """`url` returns the endpoint's address. Raises ConfigError if there is no such command."""
        self._argv = argv_of(command, env)
        self._url = url
        self._names = (*PASSED, *env)
        self._room = asyncio.Semaphore(concurrent)
        self._mark = secrets.token_hex(8)
        self._folder = ""
        self._watcher: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="millrace-agents-")
        self._watcher = watcher.start(self._mark, self._folder)

    async def run(self, task: Task) -> Any:
        async with self._room:
            task.begin()
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                path = Path(folder, "task.json")
                path.write_text(json.dumps(task.data, default=str))
                return await self._run(task, path)

    async def close(self) -> None:
        """End the watcher, and with it every process and file that is left."""
        if self._watcher is not None:
            running, self._watcher = self._watcher, None
            await asyncio.to_thread(running.communicate, timeout=_CLOSE_S)

    def _environment(self, task: Task, path: Path) -> dict[str, str]:
        url = self._url()
        return {
            **{name: os.environ[name] for name in self._names if name in os.environ},
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": task.key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": task.key,
            "MILLRACE_TASK": str(path),
            watcher.MARK: self._mark,
        }

    async def _run(self, task: Task, path: Path) -> Any:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment(task, path),
                start_new_session=True,
                limit=MOST_LINE,
            )
        except OSError as error:
            raise EpisodeError("agent_start", f"{self._argv[0]}: {error}") from error
        assert process.stdout is not None
        last: deque[str] = deque(maxlen=_LAST_LINES)
        reader = asyncio.get_running_loop().create_task(_read(process.stdout, last))
        try:
            code = await _ended(process)
        finally:
            await self._end(process, reader, task)
        if code:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            shown = " | ".join(last) or "no output"
            raise EpisodeError("agent_exit", f"{task.name}: {how}: {shown[-1000:]}")
        return _reward_of(list(last), task.name)

    async def _end(
        self, process: asyncio.subprocess.Process, reader: asyncio.Task[None], task: Task
    ) -> None:
        """Kill the group, and read the rest of the output."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            await _ended(process)
            await asyncio.wait({reader}, timeout=_DRAIN_S)
            if not reader.done():  # A process in another session holds the pipe.
                await asyncio.to_thread(watcher.kill_marked, f"OPENAI_API_KEY={task.key}")
                await asyncio.wait({reader}, timeout=_DRAIN_S)
        finally:
            reader.cancel()
            process._transport.close()  # type: ignore[attr-defined]  # the pipe may be open
        await process.wait()


async def _ended(process: asyncio.subprocess.Process) -> int:
    """Wait for the process itself: its children may hold its pipe for longer."""
    while process.returncode is None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                return await process.wait()
    return process.returncode


async def _read(stream: asyncio.StreamReader, last: deque[str]) -> None:
    """Keep the last lines of the output. Of a line that is too long, nothing is kept."""
    whole = True
    while True:
        try:
            line = await stream.readuntil()
        except asyncio.IncompleteReadError as error:
            line = error.partial
        except asyncio.LimitOverrunError as error:
            await stream.readexactly(error.consumed)
            whole = False
            continue
        if not line and whole:
            return
        text = line.decode(errors="replace").strip() if whole else f"[over {MOST_LINE} bytes]"
        if text:
            last.append(text)
        if not line.endswith(b"\n"):
            return
        whole = True


def _reward_of(lines: Sequence[str], name: str) -> Any:
    """Return the reward of a program's last line, or None if it has none.

    Raises EpisodeError if only an earlier line has one: it would be lost without a word.
    """
    found = [_reward_in(line) for line in lines]
    if any(found) and not found[-1]:
        detail = f"{name}: lines follow the reward. The last one is {lines[-1][:200]!r}"
        raise EpisodeError("bad_reward", f'{detail}. Fix: print {{"reward": ...}} last')
    return found[-1] if found else None


def _reward_in(line: str) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
        if isinstance(value, dict) and "reward" in value:
            return value
    return None
