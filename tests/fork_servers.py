"""Fork servers that the sessions of one test process use one after the other.

A server's imports take 5 s of a core, and most of these sessions do little more.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from millrace.config import packaged
from millrace.runtime.fork_server import Fork, ForkedProcess, ForkServer

Key = tuple[object, ...]
_MOST_FREE = 2
_LATE = ("COLUMNS", packaged.VARIABLE)
"""The variables that a server's imports do not read. A worker gets them when it is forked."""


class Pool:
    """The servers that no session uses, by what a server takes along from its start."""

    def __init__(self) -> None:
        self._free: list[Kept] = []

    def get(self, log: Path, engine: str, variables: Mapping[str, str]) -> ForkServer:
        """Return a server for one session. The arguments are those of ForkServer.

        `variables` are those of the threads of a worker, which sets them itself too.
        """
        own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", *_LATE))}
        key = (engine, sorted(own.items()))
        self._free = [server for server in self._free if server.code is None]
        for server in self._free:
            if server.key == key:
                self._free.remove(server)
                server.attach()
                return server
        return Kept(self, key, log, engine, variables)

    def put(self, server: Kept) -> None:
        if server not in self._free:
            self._free.append(server)
        while len(self._free) > _MOST_FREE:
            self._free.pop(0).end()

    def pids(self) -> set[int]:
        """Return the processes that live on between sessions. Each has one open socket here."""
        return {server.pid for server in self._free}

    def close(self) -> None:
        while self._free:
            self._free.pop().end()


class Kept(ForkServer):
    """A server that goes to the pool when its session closes."""

    def __init__(
        self, pool: Pool, key: Key, log: Path, engine: str, variables: Mapping[str, str]
    ) -> None:
        super().__init__(log, engine, variables)
        self.key = key
        self._pool = pool

    @property
    def pid(self) -> int:
        return self._process.pid

    def attach(self) -> None:
        """Serve the running event loop."""
        asyncio.get_running_loop().add_reader(self._socket, self._read_answer)

    async def fork(self, request: Fork, fds: Sequence[int], deadline_s: float) -> ForkedProcess:
        late = {name: os.environ.get(name, "") for name in _LATE}
        request = msgspec.structs.replace(request, variables=late | request.variables)
        return await super().fork(request, fds, deadline_s)

    def close(self) -> subprocess.Popen[bytes]:
        """Return the process of the server, or one that ends at once if the pool has the server.

        Workers that a session no longer waits for are ended as they come.
        """
        if self.code is not None or not all(answer.done() for answer in self._asked):
            return super().close()
        self._socket.setblocking(True)
        while self._asked and self.answers:
            self._read_answer()
        if not self.answers:
            return super().close()
        self._socket.setblocking(False)
        asyncio.get_running_loop().remove_reader(self._socket)
        self._pool.put(self)
        return subprocess.Popen(["true"])

    def end(self) -> None:
        """End a server that is free, and so has no workers."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


POOL = Pool()
"""The pool of this process."""
