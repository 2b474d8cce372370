"""One worker process, as the pool sees it: started, fed, watched by the clock, killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

import millrace
from millrace.config import RewardConfig
from millrace.rewards.wire import Frames, Hello, Reply, frame, hello_decoder, reply_decoder
from millrace.types import Score

START_S = 120.0
"""Seconds a worker may take to load its function."""
GRACE_S = 5.0
"""Seconds past reward.timeout_s that a worker of coroutines has to end a call by itself."""
_AHEAD_S = 0.02
_MOST_AHEAD = 64


@dataclass(slots=True, eq=False)
class Pending:
    """A call that has no answer yet."""

    id: int
    payload: bytes
    """The Call, packed."""
    size: int
    """Completions."""
    answer: asyncio.Future[list[Score]]
    sent_at: float = 0.0
    alone: bool = False
    """It ran beside others in a worker that failed: it runs alone until the one to blame is found."""


class WorkerProcess(asyncio.Protocol):
    """A worker and the calls it has, in the order sent. `dead` is set once its process group is killed and its socket closed.

    A synchronous function runs calls in order, so the first one is running, since the last reply at the latest. Coroutines
    run from when they are sent. A call that runs past its time is `condemned`, and the process killed.
    """

    def __init__(
        self,
        config: RewardConfig,
        on_change: Callable[[], None],
        on_reply: Callable[[Pending, Reply], None],
    ) -> None:
        self.config = config
        self.on_change = on_change
        self.on_reply = on_reply
        self.hello: Hello | None = None
        self.running: dict[int, Pending] = {}
        self.load = 0
        self.condemned: int | None = None
        self.overdue = False
        self.dead = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._frames = Frames()
        self._moved_at = self._loop.time()
        self._mean_s = _AHEAD_S
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None

    async def start(self) -> None:
        """Start the process, in a session of its own, with nothing but a socket between it and this one.

        Its stdout goes to stderr: what a reward function prints is seen, and mixes with nothing that is parsed.
        """
        ours, theirs = socket.socketpair()
        root = str(Path(millrace.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        c = self.config
        arguments = [theirs.fileno(), os.getpid(), c.function, c.timeout_s, c.max_concurrency]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "millrace.rewards.worker", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path},
            )
        if sys.platform == "linux":
            # The socket may outlive the worker in a child of its own: the death of the process itself counts.
            self._pidfd = os.pidfd_open(self._process.pid)
            self._loop.add_reader(self._pidfd, self.kill)
        ours.setblocking(False)
        await self._loop.create_connection(lambda: self, sock=ours)
        self._watch()

    def room(self, pending: Pending) -> bool:
        """Whether it can take the call now. Slow synchronous functions get little ahead, so that no call waits behind them."""
        if self.hello is None or self.dead.is_set() or self.overdue:
            return False
        if not self.running:
            return True
        if pending.alone or any(p.alone for p in self.running.values()):
            return False
        if self.hello.is_async:
            return self.load + pending.size <= self.config.max_concurrency
        return len(self.running) < min(max(2, _AHEAD_S / max(self._mean_s, 1e-6)), _MOST_AHEAD)

    def take(self, pending: Pending) -> None:
        """The call is this worker's; `send` carries it there."""
        pending.sent_at = self._loop.time()
        self.running[pending.id] = pending
        self.load += pending.size

    def send(self, batch: Sequence[Pending]) -> None:
        """Calls that were taken, as one frame."""
        if self._transport is not None:
            self._transport.write(frame([msgspec.Raw(p.payload) for p in batch]))
        self._watch()

    def kill(self) -> None:
        """SIGKILL to the worker and every process that it started."""
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> str:
        """Kill it, wait for its end and say how it ended."""
        self.kill()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        if self._process is None:
            return "never started"
        code = await asyncio.to_thread(self._process.wait)
        return (
            f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
        )

    def blamed(self) -> Pending | None:
        """Of a dead worker: the call that killed it or ran past its time, if it is known."""
        if self.condemned is not None:
            return self.running.get(self.condemned)
        first = next(iter(self.running.values()), None)
        return first if self.hello and (not self.hello.is_async or len(self.running) == 1) else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = self._loop.time()
        for payload in self._frames.feed(data):
            if self.hello is None:
                self.hello = hello_decoder.decode(payload)
            else:
                reply = reply_decoder.decode(payload)
                self._mean_s += 0.2 * (now - self._started_at() - self._mean_s)
                pending = self.running.pop(reply.id)
                self.load -= pending.size
                self.on_reply(pending, reply)
            self._moved_at = now
        self._watch()
        self.on_change()

    def connection_lost(self, exc: Exception | None) -> None:
        self.kill()
        self.dead.set()

    def _started_at(self) -> float:
        """When the first call began, at the latest."""
        first = next(iter(self.running.values()))
        return (
            first.sent_at
            if self.hello and self.hello.is_async
            else max(first.sent_at, self._moved_at)
        )

    def _deadline(self) -> float | None:
        if self.hello is None:
            return self._moved_at + START_S
        if not self.running:
            return None
        return self._started_at() + self.config.timeout_s + (GRACE_S if self.hello.is_async else 0)

    def _watch(self) -> None:
        """Keep one timer, no later than the deadline; it looks again where the deadline has moved on."""
        deadline = self._deadline()
        if deadline is None or self.dead.is_set():
            return
        if self._timer is not None and self._timer.when() > deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._timer = None
        deadline = self._deadline()
        if deadline is not None and self._loop.time() >= deadline:
            self.overdue = True
            if self.hello is not None and (not self.hello.is_async or len(self.running) == 1):
                self.condemned = next(iter(self.running))
            self.kill()
        else:
            self._watch()
