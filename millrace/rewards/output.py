"""The output of reward workers. It goes to stderr without secrets, up to a limit in each minute.

The rest is counted. So a function that prints a gigabyte fills no disk, and no call of it waits for
a full pipe.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import suppress

from millrace.errors import redact

KEPT = 64 * 1024
"""Bytes that the workers of one reward may print in each minute."""
WINDOW_S = 60.0
_PIECE = 1 << 20
_LINE = 8192
"""The last bytes of a line wait for its end. A secret may come in two pieces."""


class Budget:
    """The bytes that one reward may still print, and those that were dropped."""

    def __init__(self, name: str, figures: Counter[str]) -> None:
        self._name, self._figures = name, figures
        self._since = float("-inf")
        self._dropped = 0
        self.room = KEPT

    def begin(self, now: float) -> None:
        """Begin a new minute if the last one is over."""
        if now - self._since >= WINDOW_S:
            self.report()
            self._since, self.room = now, KEPT

    def drop(self, count: int) -> None:
        self._dropped += count
        self._figures["output_dropped"] += count

    def report(self) -> None:
        """Say how much was dropped since the last report."""
        if self._dropped:
            text = f"\n[{self._name}: {self._dropped:,} bytes of output were dropped]\n"
            _show(text.encode())
            self._dropped = 0


class Output:
    """The reading end of the pipe that is a worker's stdout and stderr."""

    def __init__(self, fd: int, budget: Budget) -> None:
        self._fd, self._budget = fd, budget
        self._line = b""
        """The begin of a line that has no end yet."""
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def close(self) -> None:
        """Read what a worker that has ended left, and close the pipe."""
        if self._fd >= 0:
            while self._read():
                pass
        self._end()

    def _end(self) -> None:
        if self._fd >= 0:
            self._show(b"\n" if self._line else b"")
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> bool:
        """Print or drop one piece. Return whether there was one."""
        budget = self._budget
        budget.begin(self._loop.time())
        try:
            if budget.room:
                data = os.read(self._fd, budget.room)
                budget.room -= len(data)
                count = len(data)
                self._show(data)
            else:
                count = _skip(self._fd)
                budget.drop(count)
        except BlockingIOError:
            return False
        if not count:
            self._end()
        return bool(count)

    def _show(self, data: bytes) -> None:
        """Print the lines that are whole, without secrets. The rest waits for its end."""
        text = redact((self._line + data).decode("utf-8", "surrogateescape"))
        data = text.encode("utf-8", "surrogateescape")
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        end = max(end, len(data) - _LINE)
        whole, self._line = data[:end], data[end:]
        if whole:
            _show(whole)


def _skip(fd: int) -> int:
    """Drop what a pipe has, and return the number of bytes. On Linux nothing is copied."""
    if not hasattr(os, "splice"):
        return len(os.read(fd, _PIECE))
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        return os.splice(fd, sink, _PIECE)
    finally:
        os.close(sink)


def _show(data: bytes) -> None:
    view = memoryview(data)
    with suppress(OSError):  # nobody reads stderr any more
        while view:
            view = view[os.write(2, view) :]
