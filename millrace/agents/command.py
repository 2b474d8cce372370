"""Agent programs with a process of their own for each episode.

The process is the leader of a new session. At its deadline, and when it ends, its whole process
group is killed. It gets a clean environment: no key of the user, unless agents.env names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from millrace.agents.programs import Task
from millrace.errors import EpisodeError, bad_value

PASSED = (
    *("PATH", "HOME", "USER", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
    *("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""The variables of the user that every program gets."""

MOST_LINE = 64 * 2**10
"""Bytes of one line of output that are read. The rest of a longer line is left out."""
_LAST_LINES = 20
_DRAIN_S = 2.0
"""Seconds for what is left of the output, after the program has ended."""
_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class CommandProgram:
    """Runs a command for each episode, at most `concurrent` at once."""

    def __init__(
        self, command: str, url: Callable[[], str], *, concurrent: int, env: Sequence[str] = ()
    ) -> None:
        """`url` returns the endpoint's address. Raises ConfigError if there is no such command."""
        try:
            self._argv = shlex.split(command)
        except ValueError as error:
            raise bad_value(
                "agents.command", command, f"cannot be split: {error}", "close the quote"
            ) from None
        if not self._argv or shutil.which(self._argv[0]) is None:
            raise bad_value(
                "agents.command",
                command,
                f"there is no program {self._argv[0] if self._argv else ''!r} on PATH",
                "such as `python my_agent.py`",
            )
        missing = [name for name in env if name not in os.environ]
        if missing:
            raise bad_value("agents.env", missing[0], "is not set", "set it, or leave it out")
        self._url = url
        self._names = (*PASSED, *env)
        self._room = asyncio.Semaphore(concurrent)

    async def start(self) -> None:
        return None

    async def run(self, task: Task) -> Any:
        async with self._room:
            with tempfile.TemporaryDirectory(prefix="millrace-agent-") as folder:
                path = Path(folder, "task.json")
                path.write_text(json.dumps(task.data, default=str))
                return await self._run(task, path)

    async def close(self) -> None:
        return None

    def _environment(self, task: Task, path: Path) -> dict[str, str]:
        url = self._url()
        return {
            **{name: os.environ[name] for name in self._names if name in os.environ},
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": task.key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": task.key,
            "MILLRACE_TASK": str(path),
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
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            raise EpisodeError("agent_start", f"{self._argv[0]}: {error}") from error
        assert process.stdout is not None
        last: deque[str] = deque(maxlen=_LAST_LINES)
        reader = asyncio.get_running_loop().create_task(_read(process.stdout, last))
        try:
            code = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            # A child in another session may hold the pipe open.
            await asyncio.wait({reader}, timeout=_DRAIN_S)
            reader.cancel()
        if code:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            shown = " | ".join(last) or "no output"
            raise EpisodeError("agent_exit", f"{task.name}: {how}: {shown[-1000:]}")
        return _reward_of(last[-1] if last else "")


async def _read(stream: asyncio.StreamReader, last: deque[str]) -> None:
    """Keep the last lines of the output."""
    while True:
        try:
            line = await stream.readuntil()
        except asyncio.IncompleteReadError as error:
            line = error.partial
            if not line:
                return
        except asyncio.LimitOverrunError as error:
            await stream.readexactly(error.consumed)
            continue
        if text := line.decode(errors="replace").strip():
            last.append(text[:MOST_LINE])


def _reward_of(line: str) -> Any:
    """Return the reward of a program's last line, or None if it has none."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
        if isinstance(value, dict) and "reward" in value:
            return value
    return None


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PDEATHSIG, signal.SIGKILL)
