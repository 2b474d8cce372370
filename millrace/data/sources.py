"""Sources of problems: files, hub data sets, reasoning-gym and millrace's tasks, as raw rows.

This module finds faults before a model loads: a missing, empty or unreadable file, and an unknown
name or parameter.
"""

from __future__ import annotations

import difflib
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from millrace.data import hub
from millrace.data.row_store import Read, Row, RowCache, StoredRows
from millrace.data.spec import Wrong, nearest, refused, split_spec, typed
from millrace.data.tasks import TASKS, UNLIMITED, Stream, Task, task_row
from millrace.errors import bad_row, bad_value


def read_parquet(path: Path) -> Read:
    """Read a parquet file. Raise DataError for any other file."""
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        binary = [f.name for f in file.schema_arrow if _has_bytes(f.type)]
        rows = (row for batch in file.iter_batches(4096) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            for name in binary:  # JSON would make a text of bytes, and they are no prompt
                row[name] = row[name] and {"bytes": row[name]}
            yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise bad_row(
            path.name, str(error).splitlines()[0], "is not readable as parquet", "write it again"
        ) from None


def _has_bytes(kind: Any) -> bool:
    """Return whether values of an Arrow type have bytes in them."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _has_bytes(kind.value_type)
    inside = (kind.field(n).type for n in range(kind.num_fields))
    return "binary" in str(kind) if not kind.num_fields else any(map(_has_bytes, inside))


def read_jsonl(path: Path) -> Read:
    """Read one object per line. Blank lines are skipped, but count in row numbers."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.rstrip()


def read_json(path: Path) -> Read:
    """Read a list of objects, an object with a list under "data", or one object per line.

    Raise DataError for any other content.
    """
    head = path.read_bytes()
    if not head.strip():
        return
    try:
        whole = json.loads(head)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Extra data"):
            yield from read_jsonl(path)
            return
        raise bad_row(
            path.name, f"line {error.lineno}", f"is not JSON: {error.msg}", "correct it"
        ) from None
    except UnicodeDecodeError as error:
        raise bad_row(
            path.name, f"byte {error.start}", "is not UTF-8", "save it as UTF-8"
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # JSON, but with a number or a nesting that Python does not read
        raise bad_row(
            path.name,
            path.name,
            f"cannot be read: {str(error).partition(';')[0]}",
            "shorter numbers, fewer levels",
        ) from None
    if isinstance(whole, dict):
        whole = whole["data"] if isinstance(whole.get("data"), list) else [whole]
    if not isinstance(whole, list):
        raise bad_row(
            path.name, whole, "must be a list of objects", 'the form [{"prompt": ...}, ...]'
        )
    for number, row in enumerate(whole, 1):
        if not isinstance(row, dict):
            raise bad_row(
                f"{path.name} row {number}", row, "must be an object", 'the form {"prompt": ...}'
            )
    yield from enumerate(whole, 1)


def _object(where: str, line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad_row(
            where, line[:60], f"is not UTF-8 at byte {error.start}", "save the file as UTF-8"
        ) from None
    try:
        row = json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        rule = f"is not JSON: {error.msg} at column {error.colno}"
        raise bad_row(where, text.strip(), rule, "one JSON object on each line") from None
    except (ValueError, RecursionError) as error:
        raise bad_row(
            where,
            text[:60],
            f"cannot be read: {str(error).partition(';')[0]}",
            "shorter numbers, fewer levels",
        ) from None
    if not isinstance(row, dict):
        raise bad_row(where, row, "must be an object", 'the form {"prompt": ...}')
    return row


READERS: dict[str, Callable[[Path], Read]] = {
    ".parquet": read_parquet,
    ".jsonl": read_jsonl,
    ".json": read_json,
}


_KINDS = "a .parquet, .jsonl or .json file, owner/name:split, reasoning_gym:NAME, or task:NAME"
_HUB = re.compile(r"(?P<path>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(:(?P<split>[\w.%:+\[\]-]+))?")
_OTHER_FILES = {
    ".csv",
    ".tsv",
    ".txt",
    ".arrow",
    ".gz",
    ".zst",
    ".zip",
    ".yaml",
    ".yml",
    ".xml",
    ".pkl",
    ".ndjson",
}


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one source."""

    source: str
    """The name of the source in messages."""
    name: str
    """The `data_source` of rows that have none."""
    size: int
    get: Callable[[int], Row]
    generated: bool = False
    """Rows are generated at first use, and need no check."""
    stored: StoredRows | None = None
    """The rows of a file or of the hub."""
    parameters: str = ""
    """The parameters of a generated source, whatever its name."""
    task: Task | None = None
    """The task that generates the rows. It has their alphabet and makes wrong answers."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one or several sources, one after the other."""

    parts: tuple[Part, ...]
    ends: tuple[int, ...]
    """The number of rows up to the end of each part."""

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, i: int) -> Row:
        part, at = self.locate(i)
        return part.get(at)

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    @property
    def source(self) -> str:
        return ", ".join(part.source for part in self.parts)

    def locate(self, i: int) -> tuple[Part, int]:
        """Return the part of row i, and the row's index in the part. Raise IndexError."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)} in {self.source}")
        p = self.part_of(i)
        return self.parts[p], i - (self.ends[p - 1] if p else 0)

    def part_of(self, i: int) -> int:
        """Return the place of the part of row i."""
        return bisect_right(self.ends, i)

    def describe(self, i: int) -> str:
        """Return the source and the row number, counted from 1: "train.jsonl row 17"."""
        part, at = self.locate(i)
        numbers = part.stored.numbers if part.stored is not None else ()
        return f"{part.source} row {numbers[at] if len(numbers) else at + 1}"

    def distinct(self, generated: int) -> Iterator[int]:
        """Yield the first of equal rows of each source, and the first `generated` generated ones."""
        for part, end in zip(self.parts, self.ends, strict=True):
            begin = end - part.size
            if part.stored is None:
                yield from range(begin, min(end, begin + generated))
            else:
                yield from (begin + int(at) for at in part.stored.firsts(part.size))

    def identity(self, i: int) -> int:
        """Return a number that equal rows of a source share. It is negative for a generated row."""
        p = self.part_of(i)
        part, begin = self.parts[p], self.ends[p - 1] if p else 0
        return -1 if part.stored is None else begin + int(part.stored.index[i - begin])

    @property
    def repeated(self) -> int:
        """Return the number of rows that another row of their source equals."""
        stored = [part for part in self.parts if part.stored is not None]
        return sum(p.size - len(p.stored.firsts(p.size)) for p in stored if p.stored is not None)


def load_source(
    spec: str, *, seed: int, max_rows: int = 0, key: str = "data.train_files", split: str = "train"
) -> Rows:
    """Return the rows of one source. `key` is the configuration's key in errors."""
    return load_sources((spec,), seed=seed, max_rows=max_rows, key=key, split=split)


_IN_MEMORY = RowCache()


def load_sources(
    specs: Sequence[str],
    *,
    seed: int,
    max_rows: int = 0,
    key: str = "data.train_files",
    split: str = "train",
    cache: RowCache = _IN_MEMORY,
) -> Rows:
    """Return the rows of `specs`, one after the other, at most `max_rows` if that is not 0.

    `seed` and `split` ("train" or "val") are the defaults of generated sources, so that the two
    splits never share a stream. Raise ConfigError for a missing file, an unknown kind, name or
    parameter, or a source without rows. Raise DataError for a line that is not a JSON object.
    """
    if not specs:
        raise bad_value(key, (), "names no source", f"{key}=[...] with {_KINDS}")
    parts, total = [], 0
    for part in (_part(key, spec, seed, split, cache) for spec in specs):
        if part.size == 0:
            raise bad_value(key, part.source, "has no rows", "a source with at least one row")
        room = max_rows - total if max_rows else part.size
        if room > 0:
            parts.append(replace(part, size=min(part.size, room)))
            total += parts[-1].size
    ends = tuple(sum(p.size for p in parts[: n + 1]) for n in range(len(parts)))
    return Rows(tuple(parts), ends)


def _part(key: str, spec: str, seed: int, split: str, cache: RowCache) -> Part:
    wrong, path = partial(bad_value, key, spec), Path(spec).expanduser()
    if spec.startswith("task:"):
        return _task(wrong, spec, seed, split)
    if spec.startswith("reasoning_gym:"):
        return _reasoning_gym(wrong, spec, seed, split)
    if path.suffix in READERS:
        return _file(wrong, spec, path, cache)
    match = _HUB.fullmatch(spec)
    if path.suffix in _OTHER_FILES or path.exists() or spec[:1] in "/.~":
        rule = f"a source is {_KINDS}; {path.suffix or 'no extension'} is none"
        none = f"one of these forms, or {key}=[] for no source"
        raise wrong(rule, "convert it to .jsonl" if spec else none)
    if match is None:
        kind, colon, rest = spec.partition(":")
        close = difflib.get_close_matches(kind, ["task", "reasoning_gym"], n=1)
        fix = f"{close[0]}:{rest}" if close and colon else "write one of these forms"
        raise wrong(f"a source is {_KINDS}", fix)
    return _hub(wrong, spec, match, split, cache)


def _file(wrong: Wrong, spec: str, path: Path, cache: RowCache) -> Part:
    if not path.is_file():
        folder = path.parent
        anywhere = f"a path from {Path.cwd()}, or absolute"
        if "," in spec:  # one string, because it has no brackets or only one
            key = wrong.args[0]
            raise wrong("no such file", f"'{key}=[{spec.strip('[]')}]', in brackets")
        if not folder.is_dir():
            raise wrong(f"no such file: the folder {folder} does not exist", anywhere)
        names = [p.name for p in folder.iterdir() if p.suffix in READERS]
        fix = nearest(path.name, names, f"{folder}/{{}}") if names else anywhere
        inside = ", ".join(sorted(names)[:8]) or "no data file"
        raise wrong(f"no such file; {folder.resolve()} has {inside}", fix)

    def parse(number: int, line: bytes) -> Row:
        return _object(f"{path.name} row {number}", line)

    stored = cache.of_file(path, READERS[path.suffix], parse)
    return Part(path.name, path.stem, len(stored), stored.get, stored=stored)


def _hub(wrong: Wrong, spec: str, match: re.Match[str], split: str, cache: RowCache) -> Part:
    path = match["path"]
    if match["split"] is None and split != "train":
        raise wrong("held-out problems need a split", f"{spec}:test")
    where = "owner/name[/config]:split, a network, or a file that you downloaded"
    if why := hub.refusal("dataset", path):
        raise wrong(why, where)
    import datasets  # after the request: at import it reads whether the hub is offline

    try:
        table = datasets.load_dataset(path, match["config"], split=match["split"] or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise wrong(f"cannot be loaded from the hub: {why}", where) from error
    fingerprint = str(getattr(table, "_fingerprint", ""))  # of the revision, the split and the code
    made = cache if fingerprint else _IN_MEMORY
    stored = made.of_rows(f"hub-{fingerprint}", lambda: enumerate(table, 1), path)
    return Part(spec, path, len(stored), stored.get, stored=stored)


def _task(wrong: Wrong, spec: str, seed: int, split: str) -> Part:
    name, given = split_spec(wrong, spec)
    if name not in TASKS:
        rule = f"unknown task {name!r}; known are {', '.join(TASKS)}"
        raise wrong(rule, nearest(name, TASKS, "task:{}"))
    mine = {k: given.pop(k) for k in Stream.__dataclass_fields__ if k in given}
    chosen: dict[str, Any] = {"seed": seed, "split": split} | typed(wrong, mine, Stream)
    try:
        stream = Stream(**chosen)
        task = TASKS[name](**typed(wrong, given, TASKS[name]))
    except ValueError as error:
        raise refused(wrong, error) from None
    return Part(
        spec,
        name,
        stream.size or UNLIMITED,
        lambda i: task_row(name, task, stream, i),
        generated=True,
        task=task,
        parameters=f"{task} {stream}",
    )


def _reasoning_gym(wrong: Wrong, spec: str, seed: int, split: str) -> Part:
    name, given = split_spec(wrong, spec)
    import reasoning_gym

    known = reasoning_gym.factory.DATASETS
    if name not in known:
        rule = f"reasoning-gym has no data set {name!r}"
        raise wrong(rule, nearest(name, known, "reasoning_gym:{}"))
    digest = blake2b(f"{name}|{seed}|{split}".encode(), digest_size=4).digest()
    own = {"seed": int.from_bytes(digest) % 2**31}
    params = own | typed(wrong, given, known[name][1])
    try:
        dataset = reasoning_gym.create_dataset(name, **params)
        dataset[0]
    except Exception as error:  # each generator raises its own errors
        raise refused(wrong, error) from error

    @lru_cache(maxsize=4096)
    def get(i: int) -> Row:
        entry = dataset[i]
        extra = {"reasoning_gym": name, "index": i, "metadata": entry["metadata"]}
        columns = {"prompt": entry["question"], "answer": entry["answer"]}
        return columns | {"data_source": name, "extra_info": extra}

    parameters = f"{name} {sorted(params.items())}"
    return Part(spec, name, len(dataset), get, generated=True, parameters=parameters)
