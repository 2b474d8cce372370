"""The files of a run's folder, read with care: the folder may come from somebody else.

A pipe or a device might never end, and a line might fill the memory. They are not read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

CHUNK = 1 << 24
"""The most bytes of one read. No line of a run is longer."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError if it is a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a file")
    return open(descriptor, "rb")


def drop_unfinished_line(path: Path) -> None:
    """Remove a last line without its end, which a crash left."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        with path.open("r+b") as file:
            file.truncate(len(whole))


class Appender:
    """A file of lines that only grows. Lines wait in memory while the disk refuses them."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        """`durable` lines are on the disk at the return of `add`, not only in its cache."""
        self._path, self._durable = path, durable
        self._size = path.stat().st_size if path.is_file() else 0
        """The bytes of whole lines. A refused write may leave a part behind."""
        self._waiting = b""
        self._torn = False

    def add(self, lines: bytes) -> None:
        """Write the lines, after those that wait. Raises OSError if they must wait, too."""
        self._waiting += lines
        self.catch_up()

    def catch_up(self) -> None:
        """Write the lines that wait, if any. Raises OSError if they must wait longer."""
        if not self._waiting:
            return
        if self._torn:
            with self._path.open("r+b") as file:
                file.truncate(self._size)
        self._torn = True
        with self._path.open("ab") as file:
            file.write(self._waiting)
            file.flush()
            if self._durable:
                os.fsync(file.fileno())
        self._size += len(self._waiting)
        self._waiting, self._torn = b"", False


def lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their ends. A line that is too long ends the file.

    Raises OSError if the file cannot be read.
    """
    with open_regular(path) as file:
        while (line := file.readline(CHUNK)) and (line.endswith(b"\n") or len(line) < CHUNK):
            yield line
