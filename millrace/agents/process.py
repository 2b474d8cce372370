"""Processes of agent programs: how they start, what they may know, and how they end.

Each process leads a new session. Its whole process group is killed when it ends, or earlier. It gets
a clean environment: no key of the user, unless agents.env names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import shutil
import subprocess
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable, Sequence

from millrace.errors import EpisodeError, bad_value
from millrace.process.death import kill_group, kill_marked
from millrace.process.spawn import close, isolated, spawn, spawn_waited

PASSED = (
    *("PATH", "HOME", "USER", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
    *("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""The variables of the user that every program gets."""

_MARK = "MILLRACE_AGENTS"
"""The variable that each program of a run has, and each process that it starts."""
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


class Launcher:
    """Starts the processes of one command, and ends what they leave."""

    def __init__(self, command: str, url: Callable[[], str], env: Sequence[str] = ()) -> None:
        """`url` returns the endpoint's address. Raises ConfigError if there is no such command."""
        self._argv = argv_of(command, env)
        self._url = url
        self._names = (*PASSED, *env)
        self._mark = secrets.token_hex(8)
        self.folder = ""
        """The folder for files of the programs. It goes when the launcher closes."""
        self._watcher: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="millrace-agents-")
        watch = isolated(
            "millrace.process.death.end_after_input", f"{_MARK}={self._mark}", self.folder
        )
        self._watcher = spawn(watch, {}, stdin=subprocess.PIPE)

    async def close(self) -> None:
        """End the watcher, and with it every process and file that is left."""
        if self._watcher is not None:
            running, self._watcher = self._watcher, None
            await asyncio.to_thread(running.communicate, timeout=_CLOSE_S)

    async def launch(
        self, own: dict[str, str], take: Callable[[str], None] | None = None
    ) -> Running:
        """Start the command with variables of its own. Raises EpisodeError if it cannot start.

        `take` gets each line of output, and lets the process read from a pipe.
        """
        url = self._url()
        key = secrets.token_hex(8)
        env = {
            **{name: os.environ[name] for name in self._names if name in os.environ},
            "OPENAI_BASE_URL": f"{url}/v1",
            "ANTHROPIC_BASE_URL": url,
            **own,
            _MARK: self._mark,
            f"{_MARK}_ONE": key,
        }
        try:
            streams = DEVNULL if take is None else PIPE, PIPE, STDOUT
            process = await spawn_waited(self._argv, env, streams, limit=MOST_LINE)
        except OSError as error:
            raise EpisodeError("agent_start", f"{self._argv[0]}: {error}") from error
        return Running(process, f"{_MARK}_ONE={key}", take)


class Running:
    """One process, with its last lines of output."""

    def __init__(
        self, process: Process, mark: str, take: Callable[[str], None] | None = None
    ) -> None:
        assert process.stdout is not None
        self.process = process
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        self._mark = mark
        self._reader = asyncio.get_running_loop().create_task(
            _read(process.stdout, take or self.last.append)
        )

    async def ended(self) -> int:
        """Wait for the process itself: its children may hold its pipe for longer."""
        while self.process.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    return await self.process.wait()
        return self.process.returncode

    def kill(self) -> None:
        """Kill the process group."""
        kill_group(self.process.pid)

    async def end(self) -> None:
        """Kill the group, and read the rest of the output."""
        self.kill()
        try:
            await self.ended()
            await asyncio.wait({self._reader}, timeout=_DRAIN_S)
            if not self._reader.done():  # A process in another session holds the pipe.
                await asyncio.to_thread(kill_marked, self._mark)
                await asyncio.wait({self._reader}, timeout=_DRAIN_S)
        finally:
            self._reader.cancel()
            await close(self.process)

    def failure(self, name: str, code: int) -> EpisodeError:
        """Return what an episode says about the end of its process."""
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        shown = " | ".join(self.last) or "no output"
        return EpisodeError("agent_exit", f"{name}: {how}: {shown[-1000:]}")


async def _read(stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
    """Hand over each line of the output. Of a line that is too long, nothing is kept."""
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
            take(text)
        if not line.endswith(b"\n"):
            return
        whole = True
