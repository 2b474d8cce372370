"""A file of lines that another process writes, read as it grows.

The other process may be on another machine. It may write half a line, replace the file, cut it or
not have made it yet. None of this is an error here.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import msgspec

T = TypeVar("T")

CHUNK = 1 << 24
"""The most bytes of one read. A longer line is left out."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError if it is a pipe or a device, which might never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a file")
    return open(descriptor, "rb")


class Tail(Generic[T]):
    """The JSON lines of one file that have the type `kind`. Other lines are left out."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._file = (0, 0)
        """The device and the number of the file that was read."""
        self._at = 0
        """The end of the last whole line."""

    def read(self) -> tuple[bool, list[T]]:
        """Return the lines that are new, and whether they replace all earlier ones."""
        try:
            opened = open_regular(self._path)
        except OSError:  # not made yet, or not there for a moment
            return False, []
        with opened as file:
            found = os.fstat(file.fileno())
            file_now = found.st_dev, found.st_ino
            anew = bool(self._at) and (file_now != self._file or found.st_size < self._at)
            if anew or not self._at:
                self._file, self._at = file_now, 0
            lines: list[T] = []
            try:
                while self._at < found.st_size:
                    file.seek(self._at)
                    data = file.read(CHUNK)
                    whole = data.rfind(b"\n") + 1
                    if not whole and len(data) < CHUNK:
                        break  # half a line: its end comes later
                    self._at += whole or len(data)
                    lines += self._decoded(data[:whole])
            except OSError:  # the file went away on a shared file system
                pass
        return anew, lines

    def _decoded(self, data: bytes) -> list[T]:
        lines: list[T] = []
        for text in data.split(b"\n"):
            try:
                if text:
                    lines.append(self._decoder.decode(text))
            except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError):
                continue  # a crash cut it, or millrace did not write it
        return lines
