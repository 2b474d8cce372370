"""A process that imports torch and transformers once, and then forks the workers of a run.

On a CPU, these imports are most of a worker's start: 4 s of a core. A worker that takes the place of
a lost one starts without them. `python -m millrace.runtime.fork_server FD PARENT ENGINE` is the
process. FD is a socket of the driver, PARENT is the driver's process id, and ENGINE is the
configuration's trainer.engine.

waits for  requests of the driver, and the ends of workers
produces   worker processes, and the exit code of each
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
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

from millrace.errors import WorkerError
from millrace.runtime import host

_MOST_BYTES = 1 << 17
_FDS = 3


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


class Ended(msgspec.Struct, tag=True):
    """A worker has ended. Its code is that of subprocess.Popen: negative for a signal."""

    pid: int
    code: int


_requests = msgspec.msgpack.Decoder(Fork | Forget)
_answers = msgspec.msgpack.Decoder(Forked | Ended)


# -- the driver's side


class ForkedProcess:
    """What subprocess.Popen offers, for a process that the server started."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self._server: ForkServer | None = server

    def poll(self) -> int | None:
        """Return the exit code, or None. From then on, the process id may be another's."""
        if self.code is not None and self._server is not None:
            self._server.forget(self)
            self._server = None
        return self.code

    def kill(self) -> None:
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The server on the driver's side. It ends with the driver, and all of its workers with it."""

    def __init__(self, log: Path, engine: str, variables: Mapping[str, str]) -> None:
        """Start the server, which imports a train engine.

        `variables` are those that libraries read when they are imported.
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid()), engine],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | variables,
                start_new_session=True,
            )
        self.alive = self.answers = True
        self._log = log
        self._asked: deque[asyncio.Future[ForkedProcess]] = deque()
        self._running: dict[int, ForkedProcess] = {}
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._hear)

    async def fork(self, request: Fork, fds: Sequence[int], deadline_s: float) -> ForkedProcess:
        """Start a worker. Raises WorkerError if the server has ended or does not answer."""
        answer: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(request)], fds)
            return await asyncio.wait_for(answer, deadline_s)
        except TimeoutError:
            self.answers = False
            reason = f"the fork server did not answer within {deadline_s:g} s"
        except OSError as error:
            self._lost()
            reason = f"the fork server does not listen: {error}"
        raise WorkerError(f"worker {request.name} did not start: {reason}; its log is {self._log}")

    def forget(self, process: ForkedProcess) -> None:
        """Let the server wait for an ended process."""
        if self.alive:
            with contextlib.suppress(OSError):
                self._socket.send(msgspec.msgpack.encode(Forget(process.pid)))

    def _hear(self) -> None:
        """Read what the server says."""
        try:
            data = self._socket.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        message = _answers.decode(data)
        if isinstance(message, Ended):
            self._running.pop(message.pid).code = message.code
            return
        process = self._running[message.pid] = ForkedProcess(self, message.pid)
        if not (answer := self._asked.popleft()).done():
            answer.set_result(process)

    def _lost(self) -> None:
        """Note that the server has ended. Its workers end with it."""
        if not self.alive:
            return
        self.alive = self.answers = False
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        for process in self._running.values():
            process.code = -signal.SIGKILL
        self._running.clear()
        while self._asked:
            if not (answer := self._asked.popleft()).done():
                answer.set_exception(ConnectionResetError("it has ended"))

    def close(self) -> subprocess.Popen[bytes]:
        """Let the server end, and kill what it still runs. Return its process."""
        self._lost()
        return self._process


# -- the server


def main() -> NoReturn:
    host.die_with(int(sys.argv[2]))
    host.ignore_stop_signals()
    driver = socket.socket(fileno=int(sys.argv[1]))
    _import(sys.argv[3])
    bell, ring = socket.socketpair()
    ring.setblocking(False)
    signal.set_wakeup_fd(ring.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    running: set[int] = set()
    while True:
        ready, _, _ = select.select([driver, bell], [], [])
        if bell in ready:
            bell.recv(4096)
            for answer in _ended(running):
                driver.send(msgspec.msgpack.encode(answer))
        if driver in ready:
            data, fds, _, _ = socket.recv_fds(driver, _MOST_BYTES, _FDS)
            if not data:
                _end(running)
            request = _requests.decode(data)
            if isinstance(request, Forget):
                os.waitpid(request.pid, 0)
                continue
            server = os.getpid()
            if (pid := os.fork()) == 0:
                for inherited in (driver, bell, ring):
                    inherited.close()
                _become(request, fds, server)
            for fd in fds:
                os.close(fd)
            running.add(pid)
            driver.send(msgspec.msgpack.encode(Forked(pid)))


def _import(engine: str) -> None:
    """Import what workers import on a CPU. A worker that needs another module imports it itself."""
    gc.disable()  # an import of torch and transformers otherwise takes a sixth longer
    try:
        import millrace.decode.engine
        import millrace.models.device
        import millrace.runtime.worker
        import millrace.sync.collective  # noqa: F401
        from millrace.train.factory import imported

        imported(engine)
    except Exception:  # noqa: BLE001 - the worker meets the same error, and reports it
        traceback.print_exc()
    gc.enable()
    gc.freeze()


def _ended(running: set[int]) -> list[Ended]:
    """Return the workers that have ended. Their numbers stay taken until the driver forgets them."""
    found = []
    for pid in list(running):
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is not None:
            exited = end.si_code == os.CLD_EXITED
            found.append(Ended(pid, end.si_status if exited else -end.si_status))
            running.discard(pid)
    return found


def _end(running: set[int]) -> NoReturn:
    """End with all workers, because the driver has closed its end."""
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _become(request: Fork, fds: Sequence[int], server: int) -> NoReturn:
    """Be a worker."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        host.die_with(server)
        calls, beats, output = fds
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.update(request.variables)
        host.work(calls, request.role, beats, request.heartbeat_s)
    except BaseException:  # noqa: BLE001 - a forked process must not go on as the server
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
