"""RUN/samples: the trajectories that made each version, as Parquet, with their texts.

    RUN/samples/version-000001-attempt-001.parquet

A file has the trajectories that trained its version, and those that were dropped since the version
before it. A row is one trajectory. A file is complete or absent.

The loop only appends to a queue. A thread decodes the tokens and writes. If the disk is full, or
too slow, versions are missing and the run loses nothing. A kill may lose the versions that wait.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.json as pj
import pyarrow.parquet as pq

from millrace.codec import sendable
from millrace.observe.files import files_in, make_folder, size_of
from millrace.persist.run_reader import SAMPLES, RunReader
from millrace.types import PolicyVersion, Sample, Tokens, Trajectory, tokens_of
from millrace.waits.registry import Event

Decode = Callable[[Tokens], str]

_SEGMENT = pa.struct(
    [
        ("version", pa.int32()),
        ("author", pa.string()),
        ("tokens", pa.int32()),
        ("text", pa.string()),
    ]
)
SCHEMA = pa.schema(
    [
        ("version", pa.int32()),
        ("sample", pa.int64()),
        ("trajectory", pa.int16()),
        ("outcome", pa.string()),
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("ground_truth", pa.string()),
        ("reward", pa.float64()),
        ("raw", pa.float64()),
        ("components", pa.map_(pa.string(), pa.float64())),
        ("answer", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("tokens", pa.int32()),
        ("stop", pa.string()),
        ("ended", pa.string()),
        ("threads", pa.int16()),
        ("messages", pa.string()),
        ("admitted_version", pa.int32()),
        ("first", pa.int64()),
        ("windows_before", pa.int32()),
        ("segments", pa.list_(_SEGMENT)),
    ]
)
"""The columns. `version` is the version that the row trained. A dropped row has the live version.

`reward` is the value that training used, and `raw` the value before any shaping. `messages` is the
conversation by author as JSON. `first` is the sample that began the response, and `windows_before`
the number of its windows before this one: 0 if it is trained whole. A segment of the author
"opening" begins each thread but the first, and has the thread's own opening.
"""

_OURS = re.compile(rf"(superseded-\d+-|\.writing-)?{SAMPLES.pattern}")

_OLDER = pa.schema([field for field in SCHEMA if field.name not in ("first", "windows_before")])
"""The columns of an older file. The others are null."""
_ROWS = 1024
"""Rows that are in memory as texts at once."""
_BYTES_OF_TRAJECTORY = 1000
"""Memory of a trajectory that waits, without its tokens."""
_BYTES_OF_TOKEN = 8

Kept = tuple[Sample, PolicyVersion, str]
"""A sample, the version of its rows, and their outcome."""


_PAIRS = pa.list_(pa.struct([pa.field("key", pa.string(), False), ("value", pa.float64())]))
_LINES = pa.schema([(f.name, _PAIRS if f.name == "components" else f.type) for f in SCHEMA])
"""The columns as lines of JSON, which pyarrow reads into everything but a map."""
_encode = msgspec.json.Encoder().encode


def rows_of(
    sample: Sample, version: PolicyVersion, outcome: str, decode: Decode
) -> Iterator[dict[str, Any]]:
    """Yield the row of every trajectory of a sample, with its components as pairs."""
    prompt = sample.prompt
    common = {
        "version": version,
        "sample": prompt.index,
        "outcome": outcome,
        "data_source": _clean(prompt.data_source),
        "prompt": _clean(prompt.text),
        "ground_truth": _text(prompt.ground_truth),
        "prompt_tokens": len(prompt.tokens),
        "admitted_version": sample.admitted_version,
        "first": prompt.first,
        "windows_before": prompt.continues.number if prompt.continues is not None else 0,
    }
    for i, trajectory in enumerate(sample.trajectories):
        score, segments = trajectory.score, list(_segments(trajectory, decode))
        # A character may begin in one segment and end in the next one.
        whole = len(trajectory.segments) == 1
        response = segments[-1]["text"] if whole else _clean(decode(trajectory.tokens))
        yield common | {
            "trajectory": i,
            "response": response,
            "reward": None if score is None else score.value,
            "raw": None if score is None else score.unshaped,
            "components": []
            if score is None
            else [{"key": _clean(k), "value": float(v)} for k, v in score.extra.items()],
            "answer": None if score is None else _text(score.answer),
            "tokens": trajectory.num_tokens,
            "stop": str(trajectory.stop) if trajectory.stop else None,
            "ended": trajectory.ended or None,
            "threads": len(trajectory.threads),
            "messages": _text(list(trajectory.messages)) if trajectory.messages else None,
            "segments": segments,
        }


def table_of(rows: Sequence[bytes]) -> pa.Table:
    """Return lines of JSON as a table. pyarrow would import pandas for a list, which takes half a second."""
    if not rows:
        return SCHEMA.empty_table()
    data = b"\n".join(rows)
    table = pj.read_json(
        io.BytesIO(data),
        pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
        pj.ParseOptions(explicit_schema=_LINES),
    )
    pairs = table["components"].combine_chunks()
    ends, keys, values = pairs.offsets, pairs.values.field("key"), pairs.values.field("value")
    place, column = SCHEMA.get_field_index("components"), SCHEMA.field("components")
    return table.set_column(place, column, pa.MapArray.from_arrays(ends, keys, values))


def _segments(trajectory: Trajectory, decode: Decode) -> Iterator[dict[str, Any]]:
    for i, thread in enumerate(trajectory.threads):
        parts = [(s.version, str(s.author), s.tokens) for s in thread.segments]
        if i or thread.opening is not None:
            opening = tokens_of() if thread.opening is None else thread.opening
            parts.insert(0, (-1, "opening", opening))
        for version, author, tokens in parts:
            text = _clean(decode(tokens))
            yield {"version": version, "author": author, "tokens": len(tokens), "text": text}


def _clean(text: str) -> str:
    return text if text.isascii() else sendable(text)


def _text(value: Any) -> str | None:
    """Return a value as text. Anything but a text is JSON."""
    if value is None:
        return None
    is_text = isinstance(value, str)
    return _clean(value if is_text else json.dumps(value, default=str, ensure_ascii=False))


class SampleStore:
    """Keeps the samples of one attempt. It never waits and never raises.

    Its limits: `max_mb` MiB of the folder, and `waiting_mb` MiB of samples that wait for the disk.
    `close` waits for `close_s`.
    """

    names = frozenset({"stepped", "published", "equal_outcomes"})

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        version: PolicyVersion,
        decode: Decode,
        note: Callable[[str], None],
        *,
        share: float = 1.0,
        max_mb: int = 512,
        waiting_mb: int = 256,
        close_s: float = 10.0,
    ) -> None:
        """The attempt begins at `version`: later versions of earlier attempts are superseded.

        `decode` is called in a thread. `note` gets one line for each problem.
        """
        self.lost = 0
        """Samples that found too many others waiting."""
        self._folder, self._attempt = run_dir / "samples", attempt
        self._start = self._version = version
        self._decode, self._note, self._share = decode, note, share
        self._limit, self._most_waiting = max_mb * 2**20, waiting_mb * 2**20
        self._close_s, self._ended = close_s, share <= 0
        self._trained: dict[int, Sample] = {}
        """Trained samples whose version is not live yet."""
        self._dropped: list[Kept] = []
        self._dropped_bytes = 0
        self._queue: SimpleQueue[tuple[PolicyVersion, list[Kept], int] | None] = SimpleQueue()
        self._waiting = 0
        self._lock = threading.Lock()
        self._total = 0
        self._thread = threading.Thread(target=self._work, name="samples", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if self._ended:
            return
        if event.track == "trainer" and event.name == "stepped":
            for sample in event.facts["samples"]:
                if keeps(sample.prompt.index, self._share):
                    self._trained[sample.prompt.index] = sample
        elif event.track == "run" and event.name == "published":
            ids, version = event.facts["ids"], event.facts["version"]
            trained = [s for i in ids if (s := self._trained.pop(i, None)) is not None]
            self._hand_over(version, trained)
            self._version = version
        elif event.track == "samples" and event.name == "equal_outcomes":
            self._drop(event.facts["sample"], event.name)

    def close(self) -> None:
        """Write the versions that wait, and what was dropped since. Waits for at most `close_s`.

        The dropped samples get the file of the version that did not come. A resumed run supersedes
        it.
        """
        if self._dropped and not self._ended:
            self._hand_over(self._version + 1, [])
        self._queue.put(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive():  # it writes one of those that are no longer in the queue
            self._ended = True
            self._note(f"samples: the last {self._queue.qsize()} versions were not kept in time")
        self._trained.clear()

    def _drop(self, sample: Sample, reason: str) -> None:
        if keeps(sample.prompt.index, self._share):
            bytes_ = _bytes(sample)
            if self._waiting + self._dropped_bytes + bytes_ > self._most_waiting:
                self._lose(1)
                return
            self._dropped.append((sample, self._version, f"dropped/{reason}"))
            self._dropped_bytes += bytes_

    def _hand_over(self, version: PolicyVersion, trained: list[Sample]) -> None:
        kept: list[Kept] = [(sample, version, "trained") for sample in trained]
        bytes_ = sum(map(_bytes, trained)) + self._dropped_bytes
        kept += self._dropped
        self._dropped, self._dropped_bytes = [], 0
        if self._waiting + bytes_ > self._most_waiting and self._waiting:
            self._lose(len(kept))
        elif kept:
            with self._lock:
                self._waiting += bytes_
            self._queue.put((version, kept, bytes_))

    def _lose(self, count: int) -> None:
        if not self.lost:
            self._note(
                f"warning: {self._folder} is too slow, and samples wait for it. Some are not kept. "
                "The run does not wait for it."
            )
        self.lost += count

    # -- in the thread

    def _work(self) -> None:
        try:
            self._prepare()
            while not self._ended and (waiting := self._queue.get()) is not None:
                version, kept, bytes_ = waiting
                self._write(version, kept)
                with self._lock:
                    self._waiting -= bytes_
        except OSError as error:
            self._stop(f"{self._folder} cannot be written: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - a run does not end because its samples do
            self._stop(f"{type(error).__name__}: {error}")

    def _prepare(self) -> None:
        """Supersede the versions that this attempt makes again, and remove unfinished files."""
        if not self._ended:
            make_folder(self._folder)
        supersede(self._folder, self._start)
        for path in files_in(self._folder, _OURS):
            if path.name.startswith(".writing-") and not self._ended:
                path.unlink()
        self._total = size_of(files_in(self._folder, _OURS))

    def _write(self, version: PolicyVersion, kept: list[Kept]) -> None:
        final = path_of(self._folder.parent, version, self._attempt)
        temporary = final.with_name(f".writing-{final.name}")
        try:
            write(temporary, kept, self._decode)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        size = temporary.stat().st_size
        if self._total + size > self._limit:
            temporary.unlink()
            mib = self._limit >> 20
            self._stop(f"{self._folder} has {mib} MiB. report.samples_mb sets this limit")
        elif final.exists() or final.is_symlink():  # it is not this attempt's
            temporary.unlink()
            self._stop(f"{final} exists already")
        else:
            temporary.rename(final)
            self._total += size

    def _stop(self, why: str) -> None:
        self._ended = True
        self._queue = SimpleQueue()  # the rest needs no memory
        self._note(f"no more samples are kept: {why}. The run continues.")


def write(path: Path, kept: Sequence[Kept], decode: Decode) -> None:
    """Write a new file of samples."""
    with path.open("xb") as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as out:
        rows = list[bytes]()
        for sample, version, outcome in kept:
            rows += map(_encode, rows_of(sample, version, outcome, decode))
            if len(rows) >= _ROWS:
                out.write_table(table_of(rows))
                rows.clear()
        out.write_table(table_of(rows))


def path_of(run_dir: Path, version: PolicyVersion, attempt: int) -> Path:
    """Return the file of a version's samples."""
    return run_dir / "samples" / f"version-{version:06d}-attempt-{attempt:03d}.parquet"


def keeps(sample: int, share: float) -> bool:
    """Whether a sample belongs to the share that is kept. It depends on these two numbers alone."""
    digest = hashlib.blake2b(str(sample).encode(), digest_size=8).digest()
    return share >= 1 or int.from_bytes(digest, "big") < share * 2**64


def supersede(folder: Path, version: PolicyVersion) -> None:
    """Rename the files of versions after `version`, from which an attempt begins."""
    if folder.is_symlink():
        return
    for path in files_in(folder, SAMPLES):
        if (match := SAMPLES.fullmatch(path.name)) and int(match[1]) > version:
            number = 1
            while (folder / f"superseded-{number}-{path.name}").exists():
                number += 1
            path.rename(folder / f"superseded-{number}-{path.name}")


def files(run_dir: Path, notes: list[str]) -> list[Path]:
    """Return the readable files of the surviving history, by version.

    `notes` gets a line if others are left out.
    """
    found, others, paths = [], list[str](), RunReader(run_dir).samples
    for path in paths:
        try:
            if (schema := pq.read_schema(path)).equals(SCHEMA) or schema.equals(_OLDER):
                found.append(path)
                continue
            lacks = ", ".join(name for name in SCHEMA.names if name not in schema.names)
            others.append(f"{path.name} has {f'no {lacks}' if lacks else 'other types'}")
        except (OSError, pa.ArrowException):
            others.append(f"{path.name} is damaged")
    if others:
        left = f"{len(others)} of {len(paths)} files are left out, first: {others[0]}"
        notes.append(f"RUN/samples: {left}")
    return found


def dataset(run_dir: Path, notes: list[str] | None = None) -> ds.Dataset:
    """Return the rows of the surviving history, by version. A query reads what it needs of them."""
    if paths := [str(path) for path in files(run_dir, [] if notes is None else notes)]:
        return ds.dataset(paths, schema=SCHEMA, format="parquet")
    return ds.dataset(SCHEMA.empty_table())


def _bytes(sample: Sample) -> int:
    """Return about how much memory a sample takes while it waits."""
    return sum(_BYTES_OF_TRAJECTORY + _BYTES_OF_TOKEN * t.num_tokens for t in sample.trajectories)
