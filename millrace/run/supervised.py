"""The driver's end of the channel to its supervisor, `millrace train --keep-going`.

The driver tells the folder of its run, the start of its attempt and its last error, each as one
line of JSON. The supervisor sends a byte for each stop signal that it gets. When the supervisor
dies, the channel ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from functools import cache

import msgspec

CHANNEL, REASON = "MILLRACE_SUPERVISOR", "MILLRACE_RESTARTED"
"""Environment variables: the file descriptor of the channel, and why the driver is started anew."""


class DriverStatus(msgspec.Struct, omit_defaults=True):
    """A status message of a driver to its supervisor."""

    run: str = ""
    """The folder of the run."""
    attempt: int = 0
    """The number of the attempt that begins to train."""
    version: int = 0
    """The version from which the attempt starts."""
    error: str = ""


@cache
def channel() -> socket.socket | None:
    """Return the channel, or None if there is no supervisor. Workers do not inherit it."""
    if (fd := os.environ.pop(CHANNEL, None)) is None:
        return None
    found = socket.socket(fileno=int(fd))
    found.set_inheritable(False)
    return found


@cache
def restart_reason() -> str:
    """Return why the supervisor started this driver anew, or nothing for a first start."""
    return os.environ.pop(REASON, "")


def send_status(news: DriverStatus) -> None:
    """Tell the supervisor, if there is one and it lives."""
    if (to := channel()) is not None:
        with contextlib.suppress(OSError):
            to.sendall(msgspec.json.encode(news) + b"\n")


@contextlib.contextmanager
def stops(on_stop: Callable[[int], None]) -> Iterator[None]:
    """Call `on_stop` with the number of each signal that the supervisor passes on.

    The death of the supervisor is a SIGTERM: nobody would start this driver anew, so it saves.
    """
    if (to := channel()) is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def readable() -> None:
        try:
            numbers = to.recv(64)
        except OSError:
            numbers = b""
        if not numbers:
            loop.remove_reader(to)
        for number in numbers or [signal.SIGTERM]:
            on_stop(number)

    loop.add_reader(to, readable)
    try:
        yield
    finally:
        loop.remove_reader(to)
