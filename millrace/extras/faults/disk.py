"""A disk in memory that tears writes, fills up and loses what nobody synced.

A journal orders the changes of names, as on ext4: a sync of anything makes all earlier ones
durable. A power cut takes back the newest changes that are not durable. It tears the data of files
that were written and not synced.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from millrace.observe import files
from millrace.persist import ownership
from millrace.pipeline import checkpoint, journal_file
from millrace.process import files as whole_files


class Died(BaseException):
    """The process that runs this code is dead. Nothing that it does has an effect."""


class Disk:
    """The files and folders of one world."""

    def __init__(self, dice: random.Random) -> None:
        self.files: dict[str, bytes] = {}
        self.folders: set[str] = {"/"}
        self.full = False
        self.broken = False
        """Whether reads and writes fail with EIO."""
        self.before: Callable[[str, str], None] = lambda operation, path: None
        """Called before each change with its name and its path."""
        self._dice = dice
        self._undo: list[Callable[[], None]] = []
        self._synced: dict[str, int] = {}
        """The bytes of each file that are durable. A file that is missing here is durable."""

    def power_cut(self) -> None:
        """Lose some of what is not durable."""
        for path, size in self._synced.items():
            if path in self.files:
                data = self.files[path]
                self.files[path] = data[: self._dice.randint(min(size, len(data)), len(data))]
        for _ in range(self._dice.randint(0, len(self._undo))):
            self._undo.pop()()
        self._undo.clear()
        self._synced.clear()

    def sync(self, path: str) -> None:
        self._undo.clear()
        self._synced.pop(path, None)

    def check(self, path: str, *, grows: bool = False) -> None:
        """Raise OSError if the disk refuses an operation."""
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if grows and self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def write(self, path: str, data: bytes, keep: int = 0) -> None:
        """Set the content of a file. Its first `keep` bytes were there before."""
        if parent(path) not in self.folders:
            raise FileNotFoundError(errno.ENOENT, "no such folder", path)
        old = self.files.get(path)
        self._synced[path] = min(keep, self._synced.get(path, keep))
        if old is None:
            self._undo.append(partial(self._forget, path))
        self.files[path] = data

    def _forget(self, path: str) -> None:
        self.files.pop(path, None)

    def tear(self, path: str, before: bytes, data: bytes) -> None:
        """Write a part of `data`, which begins with `before`."""
        least = min(len(before), len(data))
        size = self._dice.randint(least, max(least, len(data) - 1))
        self.write(path, data[:size], least)

    def make(self, path: str) -> None:
        if path not in self.folders:
            self.folders.add(path)
            self._undo.append(lambda: self.folders.discard(path))

    def rename(self, source: str, target: str) -> None:
        """Rename a file or a folder. It replaces a file."""
        if source not in self.files and source not in self.folders:
            raise FileNotFoundError(errno.ENOENT, "no such file", source)
        if target in self.folders:
            raise OSError(errno.ENOTEMPTY, "folder not empty", target)
        replaced = self.files.get(target)
        self._move(source, target)

        def undo() -> None:
            self._move(target, source)
            if replaced is not None:
                self.files[target] = replaced

        self._undo.append(undo)

    def _move(self, source: str, target: str) -> None:
        for path in within(self.files, source):
            moved = target + path[len(source) :]
            self.files[moved] = self.files.pop(path)
            if path in self._synced:
                self._synced[moved] = self._synced.pop(path)
        for path in sorted(within(self.folders, source)):
            self.folders.remove(path)
            self.folders.add(target + path[len(source) :])

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it."""
        files = {p: self.files[p] for p in within(self.files, path)}
        folders = {*within(self.folders, path)}
        for gone in files:
            del self.files[gone]
        self.folders -= folders

        def undo() -> None:
            self.files.update(files)
            self.folders.update(folders)

        self._undo.append(undo)

    def children(self, path: str) -> list[str]:
        """Return everything right inside a folder, in order."""
        begin = f"{path.rstrip('/')}/"
        size = len(begin)
        inside = [p for p in (*self.files, *self.folders) if p.startswith(begin)]
        return sorted(p for p in inside if len(p) > size and p.find("/", size) < 0)


def parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def within(paths: Iterable[str], folder: str) -> list[str]:
    """Return a folder or a file, and all that is in it."""
    begin = f"{folder}/"
    return [path for path in paths if path == folder or path.startswith(begin)]


class View:
    """The disk as one process sees it. A kill of the process ends the view."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.dead = False

    def change(self, operation: str, path: str, torn: Callable[[], None] | None = None) -> Disk:
        """Return the disk for a change. Raises what stops the change.

        `torn` does a part of a change that needs space. It is called if the change fails midway.
        """
        self.look(path)
        self.disk.before(operation, path)
        if torn is not None and (self.dead or self.disk.full):
            torn()
        self.look(path)
        self.disk.check(path, grows=torn is not None)
        return self.disk

    def look(self, path: str) -> Disk:
        if self.dead:
            raise Died
        self.disk.check(path)
        return self.disk


class SimPath:
    """The part of pathlib.Path that the folder of a run needs, on a simulated disk."""

    def __init__(self, view: View, path: str) -> None:
        self._view, self._path = view, path

    def __str__(self) -> str:
        return self._path

    def __truediv__(self, name: object) -> SimPath:
        return SimPath(self._view, f"{self._path}/{name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimPath) and self._path == other._path

    def __hash__(self) -> int:
        return hash(self._path)

    def __lt__(self, other: SimPath) -> bool:
        return self._path.split("/") < other._path.split("/")

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> SimPath:
        return SimPath(self._view, parent(self._path))

    def with_name(self, name: str) -> SimPath:
        return self.parent / name

    def relative_to(self, other: SimPath) -> str:
        return self._path[len(str(other)) + 1 :]

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return self._path in self._view.look(self._path).files

    def is_dir(self) -> bool:
        return self._path in self._view.look(self._path).folders

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> Any:
        return SimpleNamespace(st_size=len(self.read_bytes()), st_dev=0, st_ino=0)

    def iterdir(self) -> Iterator[SimPath]:
        for path in self._view.look(self._path).children(self._path):
            yield SimPath(self._view, path)

    def glob(self, pattern: str) -> list[SimPath]:
        return [p for p in self.iterdir() if fnmatch.fnmatchcase(p.name, pattern)]

    def rglob(self, pattern: str) -> list[SimPath]:
        inside = [*self.iterdir()]
        return [q for p in inside for q in (p, *(p.rglob(pattern) if p.is_dir() else ()))]

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        disk = self._view.change("mkdir", self._path, lambda: None)
        if self._path in disk.folders and not exist_ok:
            raise FileExistsError(errno.EEXIST, "exists", self._path)
        for end in (i for i, c in enumerate(f"{self._path}/") if c == "/" and i):
            disk.make(self._path[:end])

    def rename(self, target: SimPath) -> None:
        self._view.change("rename", self._path).rename(self._path, str(target))

    replace = rename

    def unlink(self, missing_ok: bool = False) -> None:
        self._view.change("unlink", self._path).remove(self._path)

    def read_bytes(self) -> bytes:
        files = self._view.look(self._path).files
        if self._path not in files:
            raise FileNotFoundError(errno.ENOENT, "no such file", self._path)
        return files[self._path]

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def write_bytes(self, data: bytes) -> None:
        disk = self._view.disk
        self._view.change("write", self._path, lambda: disk.tear(self._path, b"", data))
        disk.write(self._path, data)

    def write_text(self, text: str) -> None:
        self.write_bytes(text.encode())

    def open(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self.read_bytes()) if mode == "rb" else _Writer(self, mode)


class _Writer(io.BytesIO):
    """A file that is open for writing. Each flush writes what is new."""

    def __init__(self, path: SimPath, mode: str) -> None:
        self.path = path
        self._before = path.read_bytes() if path.is_file() else b""
        super().__init__(self._before)
        self.seek(0, io.SEEK_END if mode == "ab" else io.SEEK_SET)

    def fileno(self) -> Any:
        return self.path

    def flush(self) -> None:
        if self.closed or (data := self.getvalue()) == self._before:
            return
        view, path, before, self._before = self.path._view, str(self.path), self._before, data
        view.change("append", path, lambda: view.disk.tear(path, before, data))
        view.disk.write(path, data, len(before))

    def close(self) -> None:
        self.flush()
        super().close()


def _sync(path: SimPath) -> None:
    path._view.change("sync", str(path)).sync(str(path))


def _copy(source: SimPath, target: SimPath) -> None:
    target.write_bytes(source.read_bytes())


def _copy_tree(source: SimPath, target: SimPath, ignore: Any = None) -> None:
    target.mkdir()
    for path in source.iterdir():
        _copy(path, target / path.name)


def _remove_tree(path: SimPath) -> None:
    for child in [*path.iterdir()]:
        if child.is_dir():
            _remove_tree(child)
        else:
            child.unlink()
    path.unlink()


_OS = SimpleNamespace(
    O_RDONLY=0, open=lambda path, flags: path, fsync=_sync, close=lambda path: None
)
_SHUTIL = SimpleNamespace(
    copytree=_copy_tree,
    copy=_copy,
    rmtree=_remove_tree,
    ignore_patterns=shutil.ignore_patterns,
)
_PLACES: tuple[tuple[Any, str, Any], ...] = (
    (checkpoint, "shutil", _SHUTIL),
    (ownership, "shutil", _SHUTIL),
    (files, "os", _OS),
    (journal_file, "os", _OS),
    (whole_files, "os", _OS),
    (files, "open_regular", lambda path: path.open("rb")),
)


@contextmanager
def simulated_disk() -> Iterator[None]:
    """Let the code that writes a run's folder use simulated paths in the body.

    pathlib alone cannot sync, copy and remove folders, so that code calls `os` and `shutil`.
    """
    before = [(place, name, getattr(place, name)) for place, name, _ in _PLACES]
    for place, name, value in _PLACES:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)
