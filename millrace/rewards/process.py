"""One worker process on the pool's side: its start, its calls, its deadlines and its end."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from millrace.process.channel import Frames
from millrace.rewards.output import Budget, Output
from millrace.rewards.start import Launcher, ProcessHandle
from millrace.rewards.wire import Hello, Job, Reply, frame, hello_decoder, reply_decoder
from millrace.waits.registry import Wait

GRACE_S = 5.0
"""Seconds after the time limit of a call in which a worker of coroutines may end a call by itself."""
_LAST_WORDS_S = 0.5
"""Seconds after the end of a process in which its last replies are read."""
_AHEAD_S = 0.02
_MOST_AHEAD = 64


@dataclass(slots=True, eq=False)
class Pending:
    """A call that has no answer yet."""

    id: int
    payload: bytes
    """The Call, packed."""
    answer: asyncio.Future[Reply]
    wait: Wait
    """The wait of the caller, in the graph of waits."""
    sent_at: float = 0.0
    alone: bool = False
    """Whether the call must run alone. It ran in a worker that died, with several other calls."""


@dataclass(eq=False)
class WorkerProcess(asyncio.Protocol):
    """A worker and its calls, in the order sent.

    `dead` is set once the process group is killed and the socket is closed. A synchronous function
    runs calls in order: the first call has run at least since the last reply. So has the batch of
    a model, and any of the calls may be in it. Coroutines start when they are sent. A call that
    exceeds its time is `condemned`, and the process is killed.
    """

    job: Job
    environment: Mapping[str, str]
    launcher: Launcher
    budget: Budget
    on_change: Callable[[], None]
    on_reply: Callable[[Pending, Reply], None]
    hello: Hello | None = None
    running: dict[int, Pending] = field(default_factory=dict)
    condemned: int | None = None
    overdue: bool = False
    leaving: bool = False
    """Whether the worker is replaced after its last reply, which blames no other call."""
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _frames: Frames = field(default_factory=Frames)
    _moved_at: float = 0.0
    _mean_s: float = _AHEAD_S
    _timer: asyncio.TimerHandle | None = None
    _transport: asyncio.Transport | None = None
    _body: ProcessHandle | None = None
    _output: Output | None = None
    _pidfd: int | None = None

    async def start(self) -> None:
        """Start the process in a new session. A socket connects it with this process.

        What it prints goes to stderr within a limit, so the user sees it.
        """
        self._moved_at = self._loop.time()
        pool_end, worker_end = socket.socketpair()
        readable, writable = os.pipe()
        self._output = Output(readable, self.budget)
        try:
            self._body = await self.launcher.start(
                self.job, worker_end.fileno(), writable, self.environment
            )
        except BaseException:
            pool_end.close()
            raise
        finally:
            worker_end.close()
            os.close(writable)
        if sys.platform == "linux":
            # A child of the worker may keep the socket open. So the pool watches the process.
            self._pidfd = os.pidfd_open(self._body.pid)
            self._loop.add_reader(self._pidfd, self.kill)
        pool_end.setblocking(False)
        await self._loop.create_connection(lambda: self, sock=pool_end)
        self._watch()

    @property
    def pid(self) -> int:
        """Return the process id. The worker has started."""
        assert self._body is not None
        return self._body.pid

    def room(self, pending: Pending) -> bool:
        """Return whether the worker can take the call now.

        The queue of a slow synchronous function is short, so that few calls wait behind it.
        """
        if self.hello is None or self.dead.is_set() or self.overdue or self.leaving:
            return False
        if not self.running:
            return True
        if self.job.sandbox:  # The code of one response finds no other call in the worker.
            return False
        first = next(iter(self.running.values()))  # A call that must run alone is the only one.
        if pending.alone or first.alone:
            return False
        if self._together:
            return len(self.running) < self.job.room
        return len(self.running) < min(max(2, _AHEAD_S / max(self._mean_s, 1e-6)), _MOST_AHEAD)

    def take(self, pending: Pending) -> None:
        """Assign the call to this worker. `send` then transmits it."""
        pending.sent_at = self._loop.time()
        self.running[pending.id] = pending

    def send(self, batch: Sequence[Pending]) -> None:
        """Send assigned calls as one frame."""
        if self._transport is not None:
            self._transport.write(frame([msgspec.Raw(p.payload) for p in batch]))
        self._watch()

    def kill(self) -> None:
        """Send SIGKILL to the worker and every process that it started."""
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self._body is not None:
            self._body.kill()
        # A child with a session of its own may keep the socket open for ever.
        self._loop.call_later(_LAST_WORDS_S, self._hang_up)

    def _hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def stop(self) -> str:
        """Kill the process, wait for its end, and return how it ended."""
        self.kill()
        if self._timer is not None:
            self._timer.cancel()
        self._hang_up()
        ended = "never started" if self._body is None else await self._body.ended()
        if self._output is not None:
            self._output.close()
        return ended

    def blamed(self) -> Pending | None:
        """Return the call that killed a dead worker or exceeded its time, if it is known."""
        if self.leaving:
            return None
        if self.condemned is not None:
            return self.running.get(self.condemned)
        first = next(iter(self.running.values()), None)
        alone = not self._together or len(self.running) == 1
        return first if self.hello and alone else None

    @property
    def _together(self) -> bool:
        """Whether calls run together, as coroutines or in batches."""
        return self.hello is not None and (self.hello.is_async or self.hello.in_batches)

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
                self.on_reply(pending, reply)
                if reply.last:
                    self.leaving = True
                    self.kill()
            self._moved_at = now
        self._watch()
        self.on_change()

    def connection_lost(self, exc: Exception | None) -> None:
        self.kill()
        self.dead.set()

    def _started_at(self) -> float:
        """Return the latest possible start of the first call."""
        first = next(iter(self.running.values()))
        return (
            first.sent_at
            if self.hello and self.hello.is_async
            else max(first.sent_at, self._moved_at)
        )

    def _deadline(self) -> float | None:
        if self.hello is None:
            return self._moved_at + self.job.start_s
        if not self.running:
            return None
        return self._started_at() + self.job.timeout_s + (GRACE_S if self.hello.is_async else 0)

    def _watch(self) -> None:
        """Keep one timer, no later than the deadline. It is set again if the deadline has moved."""
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
            if self.running and (not self._together or len(self.running) == 1):
                self.condemned = next(iter(self.running))
            self.kill()
        else:
            self._watch()
