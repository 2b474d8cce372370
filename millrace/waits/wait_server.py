"""A thread in every process of a run that says who waits, also while the event loop is blocked.

It listens on a unix socket in RUN/.waits, which only the run's user may open. A connection gets one
JSON list of answers. Nothing is read from it. The thread also looks once a second at what moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from millrace.process.files import replace_file
from millrace.waits.answer import ProcessStatus, Pulse, answer_of
from millrace.waits.registry import PROCESS

FOLDER = ".waits"
"""The folder of the sockets, in the folder of a run."""
VARIABLE, NAME = "MILLRACE_WAITS", "MILLRACE_WORKER"
"""Environment variables of a worker: this folder, and the worker's name."""
_LOOK_S = 1.0
_SEND_S = 5.0
_LONGEST = 100
"""Bytes of a path that every system takes for a unix socket."""


class WaitServer:
    """The side thread of this process."""

    def __init__(self, name: str) -> None:
        PROCESS.name = name
        self.pulse = Pulse(PROCESS)
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop whose lateness is measured."""
        self.more: Callable[[], list[ProcessStatus]] = list
        """Returns the answers of workers that only this process can ask."""
        self.look: Callable[[WaitServer], None] = lambda side: None
        """Called once a second, in the thread."""
        self._asked_at: float | None = None
        """When the event loop was asked to run a callback that it has not run yet."""
        self._over = threading.Event()
        self._server: socket.socket | None = None
        self._files: list[Path] = []

    def start(self, folder: Path | None = None) -> None:
        """Listen in `folder`. Without one, or on a file system without sockets, only look."""
        if folder is not None:
            name = self.pulse.registry.name
            folder.mkdir(mode=0o700, exist_ok=True)
            self._files = [folder / f"{name}.sock", folder / f"{name}.json"]
            with contextlib.suppress(OSError):
                self._server = listen(self._files[0])
            about = {"name": name, "pid": os.getpid(), "host": socket.gethostname()}
            replace_file(self._files[1], json.dumps(about))
        threading.Thread(target=self._run, name="millrace-waits", daemon=True).start()

    def close(self) -> None:
        """End the thread, and remove its files."""
        self._over.set()
        for file in self._files:
            file.unlink(missing_ok=True)

    @property
    def late_s(self) -> float:
        """Return for how long the event loop has not run."""
        asked = self._asked_at
        return 0.0 if asked is None else self.pulse.registry.clock() - asked

    def answer(self) -> ProcessStatus:
        answer = answer_of(self.pulse)
        answer.late_s = self.late_s
        return answer

    def _run(self) -> None:
        while not self._over.is_set():
            self.pulse.look()
            if self.loop is not None and self._asked_at is None:
                self._asked_at = self.pulse.registry.clock()
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self.loop.call_soon_threadsafe(setattr, self, "_asked_at", None)
            self.look(self)
            if self._server is None:
                self._over.wait(_LOOK_S)
                continue
            self._server.settimeout(_LOOK_S)
            with contextlib.suppress(OSError):  # a timeout too, or the asker has left
                connection, _ = self._server.accept()
                with connection:
                    connection.settimeout(_SEND_S)
                    try:
                        reply = msgspec.json.encode([self.answer(), *self.more()])
                    except Exception:  # noqa: BLE001 - it must not end the thread that answers
                        traceback.print_exc()
                        continue  # a failure is no answer, and the next question gets one
                    connection.sendall(reply)
        if self._server is not None:
            self._server.close()


def listen(path: Path) -> socket.socket:
    """Listen at a path of any length. Only this user may connect."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    with short(path) as name:
        server.bind(name)
    path.chmod(0o600)
    server.listen(8)
    return server


@contextlib.contextmanager
def short(path: Path) -> Iterator[str]:
    """Give the body a name of `path` that fits into the address of a unix socket."""
    name = str(path)
    if len(os.fsencode(name)) <= _LONGEST or not sys.platform.startswith("linux"):
        yield name
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def start_in_worker(part: str = "") -> WaitServer | None:
    """Start the side thread of a worker, if its environment names a folder.

    `part` names a process that a worker has started, such as "core-0".
    """
    folder, name = os.environ.get(VARIABLE), os.environ.get(NAME)
    if not folder or not name:
        return None
    side = WaitServer(f"{name}-{part}" if part else name)
    with contextlib.suppress(OSError):  # the folder is not there: the run goes on without
        side.start(Path(folder))
    return side
