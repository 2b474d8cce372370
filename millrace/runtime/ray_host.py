"""The Ray actor of a worker: a Host whose frames travel through `push` and `pull`."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import psutil
import ray

from millrace.runtime.address import listening_at
from millrace.runtime.host import Host
from millrace.runtime.ray_token import hide_token
from millrace.runtime.worker import make_worker
from millrace.waits import kernel
from millrace.waits.answer import ProcessStatus
from millrace.waits.wait_server import WaitServer

WHY = "why"
"""The concurrency group of the answer to `millrace why`."""
BEAT = "beat"
"""The concurrency group of the signs of life."""
_LOOK_S = 1.0


def _end_with(parent: int) -> None:
    """End this process when the raylet that started it has ended.

    Ray looks for the raylet's number, which a zombie keeps. In a container whose process 1 waits
    for no orphan, actors would outlive their driver.
    """
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


class RayHost:
    """The actor: a Host with Ray as its transport. `serve` runs as long as the actor lives."""

    def __init__(self, name: str, role: str, loopback: bool, gpus: list[str]) -> None:
        hide_token()
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        if gpus:  # CUDA is not initialized yet
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        os.environ |= listening_at("127.0.0.1" if loopback else ray.util.get_node_ip_address())
        self._side = WaitServer(name)
        self._side.start()
        self._root = make_worker(role, alone=True)
        self._host: Host | None = None
        self._frames: list[bytes] = []
        self._early: dict[int, bytes] = {}
        self._next = 0
        self._ready = asyncio.Event()
        self._serving = asyncio.Event()

    @ray.method(concurrency_group=WHY)
    async def why(self) -> ProcessStatus:
        """Say who waits. Its event loop is another one, which no engine blocks."""
        answer = self._side.answer()
        answer.process = kernel.look([answer.pid])[answer.pid]
        return answer

    async def serve(self) -> None:
        self._side.loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            self._host = Host(self._root, self._send, tasks)
            self._serving.set()
            await asyncio.Event().wait()

    def _send(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._ready.set()

    async def up(self) -> tuple[int, float]:
        """Return this process's id and the time of its start, once `serve` runs."""
        await self._serving.wait()
        return os.getpid(), psutil.Process().create_time()

    @ray.method(concurrency_group=BEAT)
    async def beat(self) -> None:
        """Give a sign of life. This group has an event loop and a thread of its own."""

    async def push(self, number: int, frame: bytes) -> None:
        """Receive frames in the order of `number`, because Ray may reorder calls."""
        assert self._host is not None
        self._early[number] = frame
        while self._next in self._early:
            self._host.receive(self._early.pop(self._next))
            self._next += 1

    async def pull(self) -> list[bytes]:
        """Wait for a frame. Return all frames since the last pull."""
        await self._ready.wait()
        self._ready.clear()
        frames, self._frames = self._frames, []
        return frames
