"""`millrace train --keep-going`: a light process that starts the driver, and starts it anew.

    waits for  the end of the driver; stop signals; the end of a dead driver's workers; the back-off
    produces   drivers, one after the other, which resume the same run

It loads no torch. Driver and supervisor share a terminal and a process group. A signal may reach
both, or the supervisor alone, which passes each one on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
import typer

from millrace.cli.console import open_console
from millrace.config import TrainerConfig
from millrace.errors import MillraceError, bad_value
from millrace.persist.history import read
from millrace.pipeline.checkpoint import Checkpoints
from millrace.process.death import prctl
from millrace.process.spawn import spawn_waited
from millrace.process.trees import children_of, kill_all, wait_until
from millrace.run.supervised import CHANNEL, REASON, DriverStatus, channel
from millrace.waits.ask import processes

KeepGoing = Annotated[
    bool,
    typer.Option(
        "--keep-going",
        help="Start the driver anew if it dies or fails, and resume the run. Wrong keys or data, a "
        "stop by a signal and the end of the run end the command.",
    ),
]
RESTARTS = 5
Restarts = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="With --keep-going: restarts in a row without a new version, until the run fails. "
        f"{RESTARTS} by default.",
        show_default=False,
    ),
]

FAILED = 1
"""The exit code of a driver that another start may repair."""
_LONGEST_S = 60.0
_LEAVE_S = 30.0
"""Seconds that the workers of a dead driver have to end. After that, they are killed."""
_KILLED_S = 30.0
"""The same for those that were killed, also on a busy machine."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def keep_going(config: TrainerConfig, restarts: int, *, json_: bool) -> None:
    """Run this command in a child process until it ends for good, and exit as the child did.

    Return at once in the child itself.
    """
    if channel() is not None:
        return
    if config.val_only:
        rule = "a validation saves nothing that a restart could resume"
        raise bad_value("--keep-going", True, rule, "millrace eval, or train without it")
    supervisor = Supervisor(sys.argv[1:], config.resume, restarts, json_)
    raise typer.Exit(asyncio.run(supervisor.run()))


@dataclass(slots=True)
class Supervisor:
    """Starts the drivers of one run."""

    arguments: Sequence[str]
    resume: str
    """trainer.resume, as the user set it."""
    restarts: int
    json_: bool
    command: Sequence[str] = (sys.executable, "-m", "millrace")
    first_s: float = 1.0
    """Seconds before the first restart. They double with each further one in a row."""
    leave_s: float = _LEAVE_S
    _others: frozenset[psutil.Process] = frozenset()
    """Processes that this one had before. They are no part of a run."""
    _run: Path | None = None
    """The folder of the run, once a driver has told it."""
    _first: DriverStatus | None = None
    """The first attempt that began to train."""
    _furthest: int = 0
    """The newest version of any attempt."""
    _failures: int = 0
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)
    _stop: signal.Signals | None = None
    _driver: asyncio.subprocess.Process | None = None
    _channel: asyncio.StreamWriter | None = None
    _error: str = ""
    """The last error that the driver told."""

    async def run(self) -> int:
        """Start drivers until the run ends. Return the exit code of the last one.

        Raises MillraceError, with this code, if the run is given up.
        """
        self._others = frozenset(children_of(os.getpid()))
        prctl("PR_SET_CHILD_SUBREAPER", 1)  # no process whose parent dies is overlooked
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        why = ""
        while True:
            code, output = await self._start(why)
            if self._stop is None and (code < 0 or code == FAILED):
                why = self._why(code)
                await self._pause(why, code)
                continue
            if code < 0:
                raise _failed(f"{self._why(code)} while it stopped the run", code)
            sys.stdout.write(output)
            return code

    async def _start(self, why: str) -> tuple[int, str]:
        """Run one driver. Return its exit code, and its standard output with --json."""
        ours, theirs = socket.socketpair()
        environment = os.environ | {CHANNEL: str(theirs.fileno())} | ({REASON: why} if why else {})
        reader, self._channel = await asyncio.open_connection(sock=ours)
        self._error = ""
        with tempfile.TemporaryFile() as output:
            self._driver = await spawn_waited(
                [*self.command, *self.arguments, *self._resuming()],
                environment,
                (None, output.fileno() if self.json_ else None, None),
                pass_fds=[theirs.fileno()],
                session=False,
            )
            theirs.close()
            listener = asyncio.create_task(self._listen(reader), name="driver")
            code = await self._driver.wait()
            await asyncio.wait([listener], timeout=1)  # It ends with the channel.
            listener.cancel()
            self._channel.close()
            self._channel = self._driver = None
            self._reap()
            if code < 0 and sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h\n")  # show the cursor, which the progress display hides
            output.seek(0)
            return code, output.read().decode(errors="replace")

    def _resuming(self) -> list[str]:
        """Return the overrides that let the next driver resume this run."""
        if self._run is None:
            return []
        own = Checkpoints(self._run, keep=1).all()
        named = self.resume not in ("never", "auto")
        # A checkpoint that the user named counts until the run has one of its own.
        resume = self.resume if named and not (self._first and own) else "auto"
        return [f"trainer.run_dir={json.dumps(str(self._run))}", f"trainer.resume={resume}"]

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            async for line in reader:
                news = msgspec.json.decode(line, type=DriverStatus)
                self._run = Path(news.run) if news.run else self._run
                self._error = news.error or self._error
                if news.attempt and self._first is None:
                    self._first, self._furthest = news, news.version

    def _on_signal(self, number: signal.Signals) -> None:
        """Pass a stop on. The driver counts one that reached it too only once."""
        self._stop = self._stop or number
        self._stopped.set()
        if self._channel is not None:
            self._channel.write(bytes([number]))

    def _why(self, code: int) -> str:
        if code < 0:
            return f"the driver was killed by {signal.Signals(-code).name}"
        return f"the driver failed: {self._error}" if self._error else "the driver failed"

    async def _pause(self, why: str, code: int) -> None:
        """Wait for the next start: for the end of all workers, and for the back-off."""
        if (reached := self._reached()) > self._furthest:
            self._furthest, self._failures = reached, 0
        self._failures += 1
        if self._failures > self.restarts:
            rule = f"given up after {self.restarts} restarts without a new version"
            raise _failed(f"{why}; {rule}", code)
        delay_s = min(self.first_s * 2.0 ** (self._failures - 1), _LONGEST_S)
        where = f" of {self._run}" if self._run is not None else ""
        count = f"{self._failures} of {self.restarts}"
        self._say(f"{why}; restart {count}{where} in {delay_s:g} s")
        await self._workers_end(code)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), delay_s)
            assert self._stop is not None
            raise _failed(f"stopped by {self._stop.name} before the restart", -self._stop)

    def _reached(self) -> int:
        """Return the newest version that the drivers of this supervisor have made live."""
        if self._run is None or self._first is None:
            return self._furthest
        lines = [line for line in read(self._run) if line.attempt >= self._first.attempt]
        return max((line.version for line in lines), default=self._furthest)

    async def _workers_end(self, code: int) -> None:
        """Wait until no process of the dead driver is left. Kill those that stay too long."""
        if not (left := await self._left_after(self.leave_s)):
            return
        self._say(f"killing what the dead driver left: {_named(left)}")
        kill_all(left)
        if left := await self._left_after(_KILLED_S):
            rule = "these processes of the dead driver do not end, and may have its devices"
            raise _failed(f"{_named(left)}: {rule}. Fix: end them, then trainer.resume=auto", code)

    async def _left_after(self, limit_s: float) -> dict[psutil.Process, str]:
        await wait_until(lambda: not self._left(), limit_s, poll_s=0.1)
        return self._left()

    def _left(self) -> dict[psutil.Process, str]:
        """Return the living processes that a dead driver left, with their names.

        On Linux they are this process's children now. Elsewhere only workers are known.
        """
        self._reap()
        workers = processes(self._run) if self._run is not None else []
        names = {w["pid"]: w["name"] for w in workers if w["host"] == socket.gethostname()}
        if sys.platform == "linux":
            found = [p for p in children_of(os.getpid()) if p not in self._others]
        else:
            found = [psutil.Process(pid) for pid in names if psutil.pid_exists(pid)]
        living = {}
        for process in found:
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    living[process] = names.get(process.pid) or process.name()
        return living

    def _reap(self) -> None:
        """Reap the orphans that have ended. asyncio reaps the driver."""
        if self._channel is not None and self._driver is None:
            return  # The driver is being started, and its number is not known yet.
        driver = self._driver.pid if self._driver is not None else None
        for child in psutil.Process().children():
            if child.pid != driver and child not in self._others:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)

    def _say(self, text: str) -> None:
        open_console(self.json_).print(
            f"keep-going: {text}", markup=False, highlight=False, soft_wrap=True
        )


def _named(left: dict[psutil.Process, str]) -> str:
    return ", ".join(f"{name} (process {process.pid})" for process, name in left.items())


def _failed(text: str, code: int) -> MillraceError:
    """Return an error that ends the command with the exit code of the driver."""
    error = MillraceError(text)
    error.exit_code = 128 - code if code < 0 else code
    return error
