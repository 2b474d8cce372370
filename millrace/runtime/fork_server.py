"""A process that imports torch and transformers once, and then forks the workers of a run.

On a CPU, these imports are most of a worker's start: 4 s of a core. A worker that takes the place of
a lost one starts without them. `python -m millrace.runtime.fork_server PARENT ENGINE` is the
process. PARENT is the driver's process id, and ENGINE is the configuration's trainer.engine. Its
standard input is a socket of the driver. The variables of its start are those of all workers.

waits for  requests of the driver
produces   worker processes, which end with it
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import psutil

from millrace.errors import WorkerError
from millrace.process.death import die_with, ignore_stop_signals, show_as
from millrace.process.spawn import spawn
from millrace.process.trees import kill_all
from millrace.runtime import host
from millrace.waits.registry import starting

_MOST_BYTES = 1 << 17
_FDS = 3
_EXIT_CODE = 49
"""The place of the exit code in /proc/PID/stat, after the name. See proc_pid_stat(5)."""


class Fork(msgspec.Struct, tag=True):
    """Start a worker. Its socket, its pipe for heartbeats and its log travel with the message."""

    role: str
    name: str
    heartbeat_s: float
    variables: dict[str, str]


class Forget(msgspec.Struct, tag=True):
    """Let the system give the number of an ended worker to another process."""

    pid: int


class Forked(msgspec.Struct, tag=True):
    """A worker has started. Answers come in the order of requests."""

    pid: int


class Refused(msgspec.Struct, tag=True):
    """The system did not start a process."""

    why: str


_requests = msgspec.msgpack.Decoder(Fork | Forget)
_answers = msgspec.msgpack.Decoder(Forked | Refused)


# -- the driver's side


class ForkedProcess:
    """The interface of subprocess.Popen for a process that the server started.

    An ended process keeps its number until `poll` has returned its exit code.
    """

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None
        try:
            self._process: psutil.Process | None = psutil.Process(pid)
        except psutil.NoSuchProcess:  # the server has died since
            self._process = None

    def poll(self) -> int | None:
        """Return the exit code as subprocess.Popen does, or None."""
        if self._code is None:
            self._code = self._read()
            if self._code is not None:
                self._server.forget(self.pid)
        return self._code

    def _read(self) -> int | None:
        """Return the exit code from /proc.

        Only the end of the server takes the number away before, and that kills its workers.
        """
        try:
            if self._process is None or not self._process.is_running():
                return -signal.SIGKILL
            if self._process.status() != psutil.STATUS_ZOMBIE:
                return None
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (psutil.NoSuchProcess, FileNotFoundError):
            return -signal.SIGKILL
        return os.waitstatus_to_exitcode(int(stat.rpartition(")")[2].split()[_EXIT_CODE]))

    @property
    def server_code(self) -> int | None:
        """Return the exit code of the server, or None while it runs."""
        return self._server.code

    def kill(self) -> None:
        if self._process is not None:
            kill_all([self._process])


class ForkServer:
    """The server on the driver's side. It ends with the driver, and all of its workers with it."""

    def __init__(self, log: Path, engine: str, variables: Mapping[str, str]) -> None:
        """Start the server, which imports a train engine.

        `variables` are those that libraries read when they are imported.
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("ab") as output:
            self._process = spawn(
                [sys.executable, "-m", __name__, str(os.getpid()), engine],
                os.environ | variables,
                output.fileno(),
                stdin=theirs.fileno(),
            )
        self.answers = True
        """Whether it forks further workers."""
        self._log = log
        self._asked: deque[asyncio.Future[ForkedProcess]] = deque()
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read_answer)

    async def fork(self, request: Fork, fds: Sequence[int], deadline_s: float) -> ForkedProcess:
        """Start a worker. Raises WorkerError if the server or the system does not."""
        answer: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(request)], fds)
            self._asked.append(answer)
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError:
            self.answers = False
            why = f"the fork server did not answer within {deadline_s:g} s"
        except OSError as error:
            self.answers = False
            why = f"the fork server does not answer: {error}"
        except WorkerError as error:
            why = str(error)
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._drop(answer.result())
            raise
        raise WorkerError(
            f"worker {request.name} did not start: {why}. Fix: look into {self._log}; `millrace "
            "doctor` shows the memory"
        )

    @property
    def code(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._process.poll()

    def forget(self, pid: int) -> None:
        """Let the server wait for an ended process. If it is dead, this process may be the heir."""
        try:
            self._socket.send(msgspec.msgpack.encode(Forget(pid)))
        except OSError:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _drop(self, process: ForkedProcess) -> None:
        """End a worker that nobody waits for any more."""
        process.kill()
        self.forget(process.pid)

    def _read_answer(self) -> None:
        """Read an answer of the server."""
        try:
            data = self._socket.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._stop_reading()
            return
        message, answer = _answers.decode(data), self._asked.popleft()
        if isinstance(message, Forked):
            process = ForkedProcess(self, message.pid)
            if answer.done():
                self._drop(process)
            else:
                answer.set_result(process)
        elif not answer.done():
            answer.set_exception(WorkerError(f"the system refused a process: {message.why}"))

    def _stop_reading(self) -> None:
        """Ask and hear nothing more."""
        if self._socket.fileno() == -1:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self.answers = False
        while self._asked:
            if not (answer := self._asked.popleft()).done():
                answer.set_exception(ConnectionResetError("it has ended"))

    def close(self) -> subprocess.Popen[bytes]:
        """Let the server end, and its workers with it. Return its process."""
        self._stop_reading()
        return self._process


# -- the server


def main() -> None:
    die_with(int(sys.argv[1]))
    ignore_stop_signals()
    show_as("fork-server")
    driver = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    _import(sys.argv[2])
    server = os.getpid()
    while True:
        data, fds, _, _ = socket.recv_fds(driver, _MOST_BYTES, _FDS)
        if not data:
            return  # the driver has closed its end
        request = _requests.decode(data)
        if isinstance(request, Forget):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(request.pid, 0)
            continue
        try:
            pid = os.fork()
        except OSError as error:
            driver.send(msgspec.msgpack.encode(Refused(str(error))))
        else:
            if pid == 0:
                driver.close()
                _become(request, fds, server)
            driver.send(msgspec.msgpack.encode(Forked(pid)))
        for fd in fds:
            os.close(fd)


def _import(engine: str) -> None:
    """Import what workers import on a CPU. A worker that needs another module imports it itself."""
    gc.disable()  # an import of torch and transformers otherwise takes a sixth longer
    try:
        with starting("imports"):  # forked workers inherit its times
            from millrace.config import plugins

            plugins.load("trainer.engine", engine, "train_engines")
            import millrace.decode.engine
            import millrace.models.device
            import millrace.runtime.worker
            import millrace.sync.collective  # noqa: F401
    except Exception:  # noqa: BLE001 - the worker meets the same error, and reports it
        traceback.print_exc()
    gc.enable()
    gc.freeze()


def _become(request: Fork, fds: Sequence[int], server: int) -> NoReturn:
    """Be a worker."""
    code = 1
    try:
        os.setsid()
        die_with(server)
        calls, beats, output = fds
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.update(request.variables)
        _own_random_state()
        host.work(calls, request.role, beats, request.heartbeat_s)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - a forked process must not go on as the server
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _own_random_state() -> None:
    """Draw other numbers than the other workers, where code of a user has no seed."""
    import numpy as np

    np.random.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()


if __name__ == "__main__":
    main()
