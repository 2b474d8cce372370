"""A file of lines that another process writes, read as it grows.

The other process may be on another machine. It may write half a line, replace the file, cut it or
not have made it yet. None of this is an error here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from millrace.observe.files import CHUNK, open_regular

T = TypeVar("T")


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
                    # No line of a run is longer than CHUNK. After one, nothing is.
                    self._at = self._at + whole if whole else found.st_size
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
