"""The files of a run's folder, read with care: the folder may come from somebody else.

A pipe or a device might never end, and a line might fill the memory. They are not read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

T = TypeVar("T")

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


class Tail(Generic[T]):
    """The JSON lines of a file that another process writes, read as it grows.

    The other process may be on another machine. It may write half a line, replace the file, cut it
    or not have made it yet. None of this is an error here.
    """

    def __init__(
        self,
        path: Path,
        decoder: msgspec.json.Decoder[T],
        fault: Callable[[T], str] = lambda line: "",
    ) -> None:
        """`fault` says what is wrong with a line that is readable, or ""."""
        self.path, self._decoder, self._fault = path, decoder, fault
        self.bad = 0
        """Lines that are not readable."""
        self.damage = ""
        """The first of them: its number, and what is wrong with it."""
        self.error: OSError | None = None
        """The reason why the file is not readable, if there is one."""
        self.half = False
        """Whether a last line has no end: a run writes it, or a crash cut it."""
        self._file = (0, 0)
        """The device and the number of the file that was read."""
        self._at = self._number = 0
        """The end of the last whole line, and how many lines are before it."""

    def read(self) -> tuple[bool, list[T]]:
        """Return the lines that are new, and whether they replace all earlier ones."""
        anew, lines = False, list[T]()
        self.error, self.half = None, False
        try:
            if not self.path.is_file():  # not made yet, or not there for a moment
                return anew, lines
            found = self.path.stat()
            anew = bool(self._at) and (
                (found.st_dev, found.st_ino) != self._file or found.st_size < self._at
            )
            if anew:
                self._at = self._number = self.bad = 0
                self.damage = ""
            self._file = found.st_dev, found.st_ino
            with open_regular(self.path) as file:
                while self._at < found.st_size:
                    file.seek(self._at)
                    data = file.read(CHUNK)
                    whole = data.rfind(b"\n") + 1
                    if not whole and len(data) < CHUNK:
                        self.half = True
                        break  # its end comes later
                    # No line of a run is longer than CHUNK. After one, nothing is.
                    self._at = self._at + whole if whole else found.st_size
                    lines += self._decoded(data[:whole].split(b"\n")[:-1])
        except FileNotFoundError:
            pass
        except OSError as error:
            self.error = error
        return anew, lines

    def _decoded(self, texts: list[bytes]) -> Iterator[T]:
        """Yield the lines that are readable. A crash cut the others, or no run wrote them."""
        for text in texts:
            self._number += 1
            try:
                if not text.strip():
                    continue
                line = self._decoder.decode(text)
                if not (fault := self._fault(line)):
                    yield line
                    continue
            except (
                msgspec.DecodeError,
                UnicodeDecodeError,
                OverflowError,
                RecursionError,
            ) as error:
                fault = str(error)
            self.bad += 1
            self.damage = self.damage or f"line {self._number}: not readable: {fault}"


def changed(path: Path) -> float:
    """Return the time at which a file changed last, 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def files_in(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """Return the regular files of `folder` with such a name, by name. A link is not followed."""
    try:
        if folder.is_symlink():
            return []
        found = [p for p in folder.iterdir() if name.fullmatch(p.name)]
        return sorted(p for p in found if p.is_file() and not p.is_symlink())
    except OSError:
        return []


def make_folder(folder: Path) -> Path:
    """Return `folder`, and make it if needed. A link in its place is replaced and not followed.

    Raise OSError if another file has its name.
    """
    if folder.is_symlink():
        folder.unlink()
    folder.mkdir(exist_ok=True)
    return folder


def size_of(paths: Iterable[Path]) -> int:
    """Return the bytes of all of `paths` that still exist."""
    total = 0
    for path in paths:
        with suppress(OSError):
            total += path.stat().st_size
    return total


def flat(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a configuration by their dotted names, with their values."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
