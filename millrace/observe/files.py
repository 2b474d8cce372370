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


def lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their ends. A line that is too long ends the file.

    Raises OSError if the file cannot be read.
    """
    with open_regular(path) as file:
        while (line := file.readline(CHUNK)) and (line.endswith(b"\n") or len(line) < CHUNK):
            yield line
