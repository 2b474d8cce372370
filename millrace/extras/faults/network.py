"""Simulated workers behind the real Peer and Host, and the links between them.

A link carries the frames of rpc.py. A killed worker, a closed link and a worker that stands still
therefore raise on the driver's side what they raise in reality.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from millrace.process.rpc import Peer, read_frame
from millrace.runtime.host import Host
from millrace.waits.answer import Process, ProcessStatus, Pulse, answer_of
from millrace.waits.registry import Registry, within

LATENCY_S = 0.0005
_NEXT_S = 1e-9
"""The time between two frames on one link. Timers of equal times fire in any order."""
DEATH_REPORT_S = 0.05
"""The time after which the runtime reports a dead process. It first frees its memory."""


class Link:
    """The frames between the driver and one worker, in both directions."""

    def __init__(self, dice: random.Random) -> None:
        self.closed = False
        self.delay_s = 0.0
        """The longest further delay of a frame."""
        self.duplicates = 0.0
        """The share of frames that arrive twice."""
        self.ordered = True
        self._dice = dice
        self._open_at = [0.0, 0.0]
        """The time until which nothing passes, down to the worker and up to the driver."""
        self._last = [0.0, 0.0]

    def stall(self, until: float, *directions: int) -> None:
        """Let nothing pass until a time: a partition, or a process that stands still."""
        for way in directions or (0, 1):
            self._open_at[way] = max(self._open_at[way], until)

    def carry(self, way: int, frame: bytes, deliver: Callable[[bytes], None]) -> None:
        """Deliver a frame later. `way` is 0 down to the worker, and 1 up to the driver."""
        if self.closed:
            return
        loop = asyncio.get_running_loop()
        late = self._dice.random() * self.delay_s if self.delay_s else 0.0
        at = max(loop.time() + LATENCY_S + late, self._open_at[way])
        if self.ordered:
            at = self._last[way] = max(at, self._last[way] + _NEXT_S)
        if at == float("inf"):
            return
        loop.call_at(at, self._deliver, way, frame, deliver)
        if self.duplicates and self._dice.random() < self.duplicates:
            loop.call_at(at + LATENCY_S, self._deliver, way, frame, deliver)

    def _deliver(self, way: int, frame: bytes, deliver: Callable[[bytes], None]) -> None:
        if self._open_at[way] > asyncio.get_running_loop().time():
            self.carry(way, frame, deliver)  # It was on its way when the link stalled.
        elif not self.closed:
            deliver(frame)


class SimWorker:
    """A worker process: the real Host over a simulated root object."""

    def __init__(
        self,
        name: str,
        root: Any,
        link: Link,
        deadline_s: float,
        called: Callable[[str, str], None] | None,
    ) -> None:
        """`called` gets the worker's name and the method of each call that arrives."""
        self.name, self.root, self.link, self._called = name, root, link, called
        self.dead = False
        self.stopped = False
        """Whether a signal stopped the process."""
        self.on_death: list[Callable[[], None]] = []
        self.peer = Peer(name, self._down, deadline_s=deadline_s)
        self._host: Host
        self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.pulse = Pulse(Registry(name, loop.time))
        with within(self.pulse.registry.root):  # The worker is a process of its own.
            self._task = loop.create_task(self._serve(), name=f"worker-{name}")

    def beat(self, heartbeat_s: float) -> None:
        """Ask for a sign of life now, and again and again while the process lives."""
        if not self.link.closed:
            self.link.carry(0, b"", self._echo)
            asyncio.get_running_loop().call_later(heartbeat_s, self.beat, heartbeat_s)

    def _echo(self, frame: bytes) -> None:
        if not self.dead:
            self.link.carry(1, frame, lambda frame: self.peer.beat())

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._host = Host(self.root, self._up, tasks)
            await self._ended.wait()
            raise asyncio.CancelledError  # It ends all calls, as the end of a process does.

    def _down(self, frame: bytes) -> None:
        self.link.carry(0, frame, self._receive)

    def _up(self, frame: bytes) -> None:
        if not self.dead:
            self.link.carry(1, frame, self.peer.receive)

    def _receive(self, frame: bytes) -> None:
        if self._called is not None:
            for message in read_frame(frame):
                if message.method:
                    self._called(self.name, message.method)
        if not self.dead:
            with within(self.pulse.registry.root):
                self._host.receive(frame)

    def answer(self) -> ProcessStatus:
        """Say who waits in this worker, as its side thread would. A frozen one says nothing."""
        if self.dead:
            return ProcessStatus(self.name, 0, silent=True, dead=f"worker {self.name} is dead")
        if self.stopped:
            return ProcessStatus(self.name, 0, silent=True, process=Process(0, "T"))
        return answer_of(self.pulse, stacks=False)

    def kill(self, reason: str = "was killed by SIGKILL") -> None:
        """End the process at once. The runtime reports its death a little later."""
        if self.dead:
            return
        self._end()
        text = f"worker {self.name} {reason}; its log is {self.name}.log"
        asyncio.get_running_loop().call_later(DEATH_REPORT_S, self.peer.mark_dead, text)

    async def close(self) -> None:
        """End the process at the end of a run, and wait for the end."""
        if not self.dead:
            self._end()
        self.peer.mark_dead("the run is over")
        await asyncio.wait([self._task])

    def _end(self) -> None:
        self.dead = self.link.closed = True
        for act in self.on_death:
            act()
        self._ended.set()
