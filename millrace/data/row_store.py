"""The rows of a file in Arrow: each distinct row once, with a digest of every row.

Rows of a large file are on disk, in millrace's cache, by the digest of the file. So a run needs
little memory, a second start reads nothing twice, and an edit of the file does not reach a run.

CACHE/rows/KEY/
    rows.arrow      the distinct rows as JSON, in the order of the file
    index.arrow     for each row of the file: its distinct row, its digest and its number
    manifest.json   the size of both, and the checksum of the index
    checked-*.json  the outcome of a check of all rows
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import json
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from millrace.errors import bad_row
from millrace.process.files import replace_file, sync

if TYPE_CHECKING:
    import numpy
    import pyarrow

Row = dict[str, Any]
Read = Iterable[tuple[int, "bytes | Row"]]
"""The numbers of rows in their file, and each row, or its line of JSON."""
Parse = Callable[[int, bytes], Row]
"""Returns the row of a line by its number, or raises DataError."""
Progress = Callable[[str, int, int], None]
"""Gets the name of the work, and how many of how many rows or bytes are done. 0: nobody knows."""

_FORMAT = 1
_BATCH = 8192
_ON_DISK = 8 << 20
"""Bytes of a file whose rows are kept in the cache."""
_KEPT = 16
"""Files whose rows stay in the cache. The one that was used last stays longest."""
_REPEATS = 32 << 20
"""Bytes of lines that are known as they are, which is faster than by their digests."""
_ROWS, _INDEX, _MANIFEST, _WRITING = "rows.arrow", "index.arrow", "manifest.json", ".writing-"

_OWN = f"{_WRITING}{os.uname().nodename}-"
"""The first part of the name of a folder that a process of this machine writes."""

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_sorted = msgspec.json.Encoder(order="sorted").encode


def quiet(work: str, done: int, total: int) -> None:
    """Show no progress."""


def decoded(text: bytes) -> Row:
    """Return the row that a text of JSON has. Numbers and texts are as Python's json reads them."""
    try:
        row: Row = _decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # NaN, half of a surrogate pair
        row = json.loads(text)
    return row


def encoded(row: Row) -> bytes:
    """Return a row as JSON. Values that JSON lacks, such as times, become texts."""
    try:
        return msgspec.json.encode(row, enc_hook=hook)
    except (ValueError, TypeError, RecursionError):
        return json.dumps(row, default=str).encode()


def hook(value: Any) -> Any:
    """Return a value in Python's types for an encoder of JSON."""
    import numpy

    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    return str(value)


def digest(row: Row) -> bytes:
    """Return 16 bytes that are equal for rows of equal content, in whatever format they are."""
    try:
        text = _sorted(row)
        if b"null" in text:  # a parquet file has null where a line has no such key
            text = _sorted(_without_nulls(row))
    except (ValueError, TypeError, RecursionError):
        text = json.dumps(row, default=str, sort_keys=True).encode()
    return _hash(text)


def _hash(text: bytes) -> bytes:
    return blake2b(text, digest_size=16).digest()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


@dataclass(frozen=True, eq=False)
class StoredRows:
    """The rows of one file or data set."""

    texts: pyarrow.ChunkedArray
    """The distinct rows as JSON."""
    index: numpy.ndarray[Any, Any]
    """The distinct row of each row."""
    digests: numpy.ndarray[Any, Any]
    """The first 8 bytes of each row's digest."""
    numbers: Sequence[int] = ()
    """Each row's number in its file. If empty, rows count from 1."""
    folder: Path | None = None
    """The place in the cache, if the rows are there."""

    def __len__(self) -> int:
        return len(self.index)

    def get(self, i: int) -> Row:
        """Return row i. Raise DataError if the copy in the cache is damaged."""
        text = self.texts[int(self.index[i])].as_py()
        try:
            row = decoded(text)
        except ValueError:
            row = {}
        if self.folder is not None and digest(row)[:8] != self.digests[i].tobytes():
            shutil.rmtree(self.folder, ignore_errors=True)
            rule = "is damaged, and millrace has removed it"
            raise bad_row(str(self.folder), f"row {i + 1}", rule, "the same command again")
        return row

    def firsts(self, size: int) -> numpy.ndarray[Any, Any]:
        """Return where each distinct row of the first `size` rows comes first, in order."""
        import numpy

        known = numpy.maximum.accumulate(self.index[:size])  # distinct rows count as they come
        return numpy.flatnonzero(numpy.diff(known, prepend=-1))

    def outcome(self, key: str) -> Any:
        """Return the outcome of a check that `keep_outcome` has kept, or None."""
        try:
            found = json.loads(self._outcome_file(key).read_bytes())
        except (OSError, ValueError, TypeError):
            return None
        return found if isinstance(found, dict) and found.keys() >= {"readings", "long"} else None

    def keep_outcome(self, key: str, outcome: Any) -> None:
        """Keep the outcome of a check of all rows, for the next start. A full disk is no fault."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                path = self._outcome_file(key)
                replace_file(path, json.dumps(outcome), by=str(os.getpid()))

    def _outcome_file(self, key: str) -> Path:
        if self.folder is None or not key:
            raise TypeError("rows in memory keep no outcome")
        return self.folder / f"checked-{key}.json"


@dataclass(frozen=True)
class RowCache:
    """Makes stored rows, or finds those of an earlier start."""

    folder: Path | None = None
    """The folder for the rows of large files. None keeps all rows in memory."""
    note: Callable[[str], None] = field(default=lambda text: None)
    progress: Progress = quiet

    def of_file(self, path: Path, read: Callable[[Path], Read], parse: Parse) -> StoredRows:
        """Return the rows of a file. Raise DataError for a bad line, or if the file changes."""
        before = path.stat()
        if self.folder is None or before.st_size < _ON_DISK:
            return _build(read(path), parse, None, path.name, self.progress)
        with path.open("rb") as file:
            key = hashlib.file_digest(file, "sha256").hexdigest()[:40]

        def rows() -> Read:
            yield from read(path)
            now = path.stat()
            if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise bad_row(path.name, str(path), "changed while it was read", "start again")

        return self.of_rows(f"{key}{path.suffix}", rows, path.name, parse)

    def of_rows(
        self, key: str, rows: Callable[[], Read], name: str, parse: Parse | None = None
    ) -> StoredRows:
        """Return the rows that `key` names and no others have. `name` is the source in messages."""
        if self.folder is None:
            return _build(rows(), parse, None, name, self.progress)
        place = self.folder / f"{key}-{_FORMAT}"
        if place.is_dir():
            if (found := _opened(place)) is not None:
                return found
            self.note(f"the prepared rows of {name} in {place} are damaged, so they are made again")
            shutil.rmtree(place, ignore_errors=True)
        writing = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            writing = Path(mkdtemp(prefix=f"{_OWN}{os.getpid()}-", dir=self.folder))
            # Ctrl-C abandons the thread that writes.
            atexit.register(shutil.rmtree, writing, ignore_errors=True)
            _build(rows(), parse, writing, name, self.progress)
            with contextlib.suppress(OSError):  # another process was faster
                writing.rename(place)
            self._remove_old()
            if (found := _opened(place)) is not None:
                return found
            raise OSError("the rows cannot be read after they were written")
        except OSError as error:
            why = error.strerror or error
            self.note(f"the rows of {name} are in memory: {self.folder} cannot be used: {why}")
            return _build(rows(), parse, None, name, self.progress)
        finally:
            if writing is not None:
                shutil.rmtree(writing, ignore_errors=True)

    def _remove_old(self) -> None:
        """Remove the files that were used longest ago, and those of processes that were killed."""
        assert self.folder is not None
        with contextlib.suppress(OSError):  # other processes remove them too
            places = sorted(self.folder.iterdir(), key=lambda place: -place.stat().st_mtime)
            whole = [p for p in places if not p.name.startswith(_WRITING)]
            stale = [p for p in set(places) - set(whole) if _is_stale(p)]
            for old in (*whole[_KEPT:], *stale):
                shutil.rmtree(old, ignore_errors=True)


def _is_stale(writing: Path) -> bool:
    """Whether nobody writes this folder: its process on this machine ended, or a day went by."""
    owner = writing.name.removeprefix(_OWN).partition("-")[0]
    gone = owner.isdecimal() and not psutil.pid_exists(int(owner))
    return gone or time.time() - writing.stat().st_mtime > 86_400


def _build(
    rows: Read, parse: Parse | None, folder: Path | None, name: str, progress: Progress
) -> StoredRows:
    """Store rows in `folder`, or in memory and return them."""
    import numpy
    import pyarrow

    schema = pyarrow.schema([("row", pyarrow.large_binary())])
    memory = pyarrow.BufferOutputStream()
    places: dict[int, int] = {}
    known: dict[bytes, int] = {}
    waiting: list[bytes] = []
    room, at = _REPEATS, 0
    index, digests, numbers = array("i"), array("B"), array("q")
    with (
        _no_collection(),
        pyarrow.ipc.new_file(memory if folder is None else str(folder / _ROWS), schema) as writer,
    ):

        def write() -> None:
            writer.write_batch(
                pyarrow.record_batch([pyarrow.array(waiting, schema.types[0])], schema=schema)
            )
            waiting.clear()

        for at, (number, given) in enumerate(rows, 1):
            line, row = _line(given)
            if (place := known.get(line)) is None:
                whole = _hash(_sorted(row)) if row else digest(_row(line, number, parse))
                new = len(places)
                place = places.setdefault(int.from_bytes(whole, "little"), new)
                if place == new:
                    waiting.append(line)
                    digests.frombytes(whole[:8])
                if (room := room - len(line)) > 0:
                    known[line] = place
                if len(waiting) == _BATCH:
                    write()
            index.append(place)
            numbers.append(number)
            if not at % _BATCH:
                progress(f"reading {name}", at, 0)
        write()
    columns = {
        name: numpy.frombuffer(values, kind) if values else numpy.zeros(0, kind)
        for name, values, kind in (
            ("index", index, "i4"),
            ("digest", digests, "u8"),
            ("number", numbers, "i8"),
        )
    }
    columns["digest"] = columns["digest"][columns["index"]]
    if at and numbers[-1] == at and numbers[0] == 1:  # they are all there, so all count from 1
        del columns["number"]
    if folder is not None:
        _write_index(folder, pyarrow.table(columns))
        return _stored(pyarrow.chunked_array([], schema.types[0]), columns)
    return _stored(pyarrow.ipc.open_file(memory.getvalue()).read_all().column("row"), columns)


def _stored(
    texts: pyarrow.ChunkedArray, columns: Mapping[str, Any], folder: Path | None = None
) -> StoredRows:
    numbers = columns.get("number", ())
    return StoredRows(texts, columns["index"], columns["digest"], numbers, folder)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Let Python's collector of cycles rest: rows have none, and it looks at each of millions."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _line(given: bytes | Row) -> tuple[bytes, Row | None]:
    """Return a row as a line of JSON, and the row if it needs neither that line nor `digest`."""
    if isinstance(given, bytes):
        return given, None
    try:
        line = _encode(given)
    except (ValueError, TypeError, RecursionError):
        return encoded(given), None
    return line, None if b"null" in line else given  # NaN becomes null


def _row(line: bytes, number: int, parse: Parse | None) -> Row:
    try:
        row = _decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        row = None
    if isinstance(row, dict):
        return row
    return parse(number, line) if parse is not None else decoded(line)


def _write_index(folder: Path, table: pyarrow.Table) -> None:
    """Write the index, and last the manifest, so that a folder with a manifest is whole."""
    import pyarrow

    with pyarrow.ipc.new_file(str(folder / _INDEX), table.schema) as writer:
        writer.write_table(table)
    for name in (_ROWS, _INDEX):
        sync(folder / name)
    sizes = {name: (folder / name).stat().st_size for name in (_ROWS, _INDEX)}
    replace_file(folder / _MANIFEST, json.dumps(sizes | {"sha256": _sum(folder)}), durable=True)


def _sum(folder: Path) -> str:
    with (folder / _INDEX).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _opened(folder: Path) -> StoredRows | None:
    """Return the rows of a folder, read as they are used. None if the folder is not whole."""
    import pyarrow

    try:
        sizes = json.loads((folder / _MANIFEST).read_bytes())
        if any((folder / name).stat().st_size != sizes[name] for name in (_ROWS, _INDEX)):
            return None
        if _sum(folder) != sizes["sha256"]:
            return None
        rows, index = (
            pyarrow.ipc.open_file(pyarrow.memory_map(str(folder / name))).read_all()
            for name in (_ROWS, _INDEX)
        )
        with contextlib.suppress(OSError):  # a cache that others have made may be read-only
            os.utime(folder)
        columns = {name: index.column(name).to_numpy() for name in index.column_names}
        return _stored(rows.column("row"), columns, folder)
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException):
        return None
