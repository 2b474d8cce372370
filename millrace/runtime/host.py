"""The worker's side of rpc.py: it serves calls on one root object, over any transport of frames.

`python -m millrace.runtime.host FD ROLE PARENT` is a worker process of the local runtime. It
serves on socket FD. PARENT is the driver's process id. The variable MILLRACE_BEAT has the file
descriptor of its heartbeats, and the seconds between them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import cache, partial
from typing import Any, get_type_hints

import msgspec

from millrace import codec
from millrace.process.channel import payloads_of, write_frame
from millrace.process.death import die_with, ignore_stop_signals, show_as
from millrace.process.rpc import CANCEL, FAILED, OK, Failure, Message, Outbox, read_frame
from millrace.waits.registry import acting, began
from millrace.waits.wait_server import NAME, WaitServer, start_in_worker


class Host:
    """Run calls as tasks of one group and post their replies."""

    def __init__(
        self, root: object, send: Callable[[bytes], None], tasks: asyncio.TaskGroup
    ) -> None:
        self._root = root
        self._outbox = Outbox(send)
        self._group = tasks
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._next = 1
        """The id of the next call that begins. Ids count from 1 without a gap."""
        self._early: dict[int, Message] = {}
        """Calls, and ends of calls, that arrived before calls with lower ids."""

    def receive(self, frame: bytes) -> None:
        """Begin calls in the order of their ids.

        A call that arrives twice runs once. One that was cancelled first does not run.
        """
        for message in read_frame(frame):
            if message.id >= self._next:
                if message.kind == CANCEL:
                    self._early[message.id] = message
                else:
                    self._early.setdefault(message.id, message)
                self._begin()
            elif message.kind == CANCEL and (task := self._tasks.pop(message.id, None)):
                task.cancel()

    def _begin(self) -> None:
        """Begin the calls whose turn has come."""
        while (message := self._early.pop(self._next, None)) is not None:
            self._next += 1
            if message.kind != CANCEL:
                task = self._group.create_task(self._serve(message), name=message.method)
                self._tasks[message.id] = task

    async def _serve(self, message: Message) -> None:
        try:
            method = self._resolve(message.method)
            arguments = _arguments_of(getattr(method, "__func__", method))
            with acting(message.method):
                value = await method(*arguments.decode(message.body))
            reply = Message(message.id, OK, msgspec.Raw(codec.pack(value)))
        except Exception as error:  # noqa: BLE001 - every failure travels to the caller
            trace = "".join(traceback.format_exception(error)[-6:])
            reply = Message(
                message.id,
                FAILED,
                msgspec.Raw(
                    codec.pack(
                        Failure(
                            type(error).__name__, codec.sendable(str(error)), codec.sendable(trace)
                        )
                    )
                ),
            )
        finally:
            self._tasks.pop(message.id, None)
        self._outbox.post(reply)

    def _resolve(self, path: str) -> Any:
        target = self._root
        for name in path.split("."):
            if name.startswith("_"):
                raise AttributeError(f"{path} is private")
            target = getattr(target, name)
        return target


@cache
def _arguments_of(method: Callable[..., Any]) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of a method's arguments."""
    hints = get_type_hints(method)
    kinds = tuple(kind for name, kind in hints.items() if name != "return")
    # (int, str) gives tuple[int, str], and () gives tuple[()].
    signature: Any = tuple.__class_getitem__(kinds)
    return codec.decoder(signature)


def beat(fd: int, seconds: float) -> None:
    """Write a byte every few seconds, until the driver closes the other end.

    This runs in a thread: an engine whose step takes long is alive.
    """
    while True:
        try:
            os.write(fd, b".")
        except OSError:
            return
        time.sleep(seconds)


async def serve_socket(sock: socket.socket, root: object, side: WaitServer | None = None) -> None:
    """Serve calls until the driver closes its end of the socket."""
    if side is not None:
        side.loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**26)

    async with asyncio.TaskGroup() as tasks:
        host = Host(root, partial(write_frame, writer), tasks)
        async for frame in payloads_of(reader):
            host.receive(frame)
        os._exit(0)  # the driver has closed or died, and a worker has nothing to save


def work(fd: int, role: str, beats: int, seconds: float) -> None:
    """Be the worker of a role, until the driver closes its end of the socket `fd`.

    `beats` is the file descriptor for heartbeats, one every so many `seconds`.
    """
    show_as(os.environ.get(NAME, "worker"))
    os.set_inheritable(beats, False)
    threading.Thread(target=beat, args=(beats, seconds), daemon=True).start()
    side = start_in_worker()
    from millrace.runtime.worker import make_worker

    asyncio.run(serve_socket(socket.socket(fileno=fd), make_worker(role, alone=True), side))


def main() -> None:
    die_with(int(sys.argv[3]))
    ignore_stop_signals()
    began("Python")
    beats, seconds = os.environ.pop("MILLRACE_BEAT").split()
    work(int(sys.argv[1]), sys.argv[2], int(beats), float(seconds))


if __name__ == "__main__":
    main()
