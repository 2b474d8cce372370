"""RUN/samples: the trajectories that made each version, as Parquet, with their texts.

    RUN/samples/version-000001-attempt-001.parquet

A file has the trajectories that trained its version, and those that were dropped since the version
before it. A row is one trajectory. A file is complete or absent.

The loop only appends to a queue. A thread decodes the tokens and writes. If the disk is full, or
too slow, versions are missing and the run loses nothing. A kill may lose the versions that wait.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.codec import sendable
from millrace.observe.watch import Event
from millrace.report import folders
from millrace.types import PolicyVersion, Sample, Score, Tokens, Trajectory

NAME = re.compile(r"version-(\d{6,12})-attempt-(\d{3,9})\.parquet")
"""The files of the surviving history."""
_OURS = re.compile(rf"(superseded-\d+-|\.writing-)?{NAME.pattern}")

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
        ("admitted_version", pa.int32()),
        (
            "segments",
            pa.list_(
                pa.struct(
                    [
                        ("version", pa.int32()),
                        ("author", pa.string()),
                        ("tokens", pa.int32()),
                        ("text", pa.string()),
                    ]
                )
            ),
        ),
    ]
)
"""The columns. `version` is the version that the row trained. A dropped row has the live version.

`reward` is the value that training used, and `raw` the value before any shaping.
"""

_ROWS = 1024
"""Rows that are in memory as texts at once."""
_BYTES_OF_TRAJECTORY = 1000
"""Memory of a trajectory that waits, without its tokens."""
_BYTES_OF_TOKEN = 8

Decode = Callable[[Tokens], str]
Kept = tuple[Sample, PolicyVersion, str]
"""A sample, the version of its rows, and their outcome."""


class SampleStore:
    """Keeps the samples of one attempt. It never waits and never raises.

    Its limits: `max_mb` MiB of the folder, and `waiting_mb` MiB of samples that wait for the disk.
    `close` waits for `close_s`.
    """

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
        self._queue: deque[tuple[PolicyVersion, list[Kept], int]] = deque()
        self._waiting = 0
        self._lock = threading.Lock()
        self._closing, self._wake = False, threading.Event()
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
            self._published(event.facts["version"], event.facts["ids"])
        elif event.track == "samples" and event.name == "equal_outcomes":
            self._drop(event.facts["sample"], event.name)

    def close(self) -> None:
        """Write the versions that wait, and what was dropped since. Waits for at most `close_s`.

        The dropped samples get the file of the version that did not come. A resumed run supersedes
        it.
        """
        if self._dropped and not self._ended:
            self._hand_over(self._version + 1, [])
        self._closing = True
        self._wake.set()
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            self._ended = True
            self._note(f"samples: the last {len(self._queue) + 1} versions were not kept in time")
        self._trained.clear()

    def _drop(self, sample: Sample, reason: str) -> None:
        if keeps(sample.prompt.index, self._share):
            bytes_ = _bytes(sample)
            if self._waiting + self._dropped_bytes + bytes_ > self._most_waiting:
                self._lose(1)
                return
            self._dropped.append((sample, self._version, f"dropped/{reason}"))
            self._dropped_bytes += bytes_

    def _published(self, version: PolicyVersion, ids: Sequence[int]) -> None:
        """Hand the samples of a live version to the thread."""
        trained = [s for i in ids if (s := self._trained.pop(i, None)) is not None]
        self._hand_over(version, trained)
        self._version = version

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
            self._queue.append((version, kept, bytes_))
            self._wake.set()

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
            closing = False
            while not (closing or self._ended):
                closing = self._closing  # read before the last versions are written
                if not closing:
                    self._wake.wait()
                    self._wake.clear()
                while self._queue and not self._ended:
                    version, kept, bytes_ = self._queue.popleft()
                    self._write(version, kept)
                    with self._lock:
                        self._waiting -= bytes_
        except OSError as error:
            self._stop(f"{self._folder} cannot be written: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - a run does not end because its samples do
            self._stop(f"{type(error).__name__}: {error}")

    def _prepare(self) -> None:
        """Supersede the versions that this attempt makes again, and remove unfinished files."""
        if self._ended:
            supersede(self._folder, self._start)
            return
        pa.array([""])  # The first array imports pandas. Do it before the run is busy.
        folders.own(self._folder)
        supersede(self._folder, self._start)
        for path in folders.files(self._folder, _OURS):
            if path.name.startswith(".writing-"):
                path.unlink()
        self._total = folders.size(folders.files(self._folder, _OURS))

    def _write(self, version: PolicyVersion, kept: list[Kept]) -> None:
        name = f"version-{version:06d}-attempt-{self._attempt:03d}.parquet"
        temporary, final = self._folder / f".writing-{name}", self._folder / name
        try:
            self._encode(temporary, kept)
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

    def _encode(self, path: Path, kept: list[Kept]) -> None:
        with path.open("xb") as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as out:
            rows = Rows(self._decode)
            for sample, version, outcome in kept:
                rows.add(sample, version, outcome)
                if len(rows) >= _ROWS:
                    out.write_batch(rows.take())
            out.write_batch(rows.take())

    def _stop(self, why: str) -> None:
        self._ended = True
        self._queue.clear()
        self._note(f"no more samples are kept: {why}. The run continues.")


def keeps(sample: int, share: float) -> bool:
    """Whether a sample belongs to the share that is kept. It depends on these two numbers alone."""
    if share >= 1:
        return True
    digest = hashlib.blake2b(str(sample).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def supersede(folder: Path, version: PolicyVersion) -> None:
    """Rename the files of versions after `version`, from which an attempt begins."""
    if folder.is_symlink():
        return
    for path in folders.files(folder, NAME):
        if (match := NAME.fullmatch(path.name)) and int(match[1]) > version:
            number = 1
            while (folder / f"superseded-{number}-{path.name}").exists():
                number += 1
            path.rename(folder / f"superseded-{number}-{path.name}")


def files(run_dir: Path) -> list[Path]:
    """Return the readable files of the surviving history, by version."""
    found = []
    for path in folders.files(run_dir / "samples", NAME):
        try:
            if pq.read_schema(path).equals(SCHEMA):
                found.append(path)
        except (OSError, pa.ArrowException):
            continue  # damaged, or not millrace's
    return found


def read(
    run_dir: Path, columns: Sequence[str] | None = None, versions: range | None = None
) -> pa.Table:
    """Return the rows of the surviving history, by version.

    `versions` selects files: a dropped row is in the file of the version that came next.
    """
    tables = [
        pq.read_table(path, columns=columns, partitioning=None)
        for path in files(run_dir)
        if versions is None or _version(path) in versions
    ]
    schema = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
    return pa.concat_tables([schema.empty_table(), *tables])


def _version(path: Path) -> PolicyVersion:
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _bytes(sample: Sample) -> int:
    """Return about how much memory a sample takes while it waits."""
    return sum(_BYTES_OF_TRAJECTORY + _BYTES_OF_TOKEN * t.num_tokens for t in sample.trajectories)


class Rows:
    """Rows in memory, column by column. Lists of whole columns are the fastest way into Arrow."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._clear()

    def __len__(self) -> int:
        return len(self._rows)

    def _clear(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        """The plain columns, in the order of SCHEMA."""
        self._segments: list[tuple[int, str, int, str]] = []
        self._segment_ends, self._component_ends = [0], [0]
        self._components: list[tuple[str, float]] = []

    def add(self, sample: Sample, version: PolicyVersion, outcome: str) -> None:
        """Add every trajectory of a sample."""
        prompt = sample.prompt
        source, text = _clean(prompt.data_source), _clean(prompt.text)
        truth, size = _text(prompt.ground_truth), len(prompt.tokens)
        for i, trajectory in enumerate(sample.trajectories):
            response, tokens = self._add_segments(trajectory)
            reward, raw, answer = self._add_score(trajectory.score)
            stop = str(trajectory.stop) if trajectory.stop else None
            self._rows.append(
                (
                    *(version, prompt.index, i, outcome, source, text, response, truth),
                    *(reward, raw, answer, size, tokens, stop, sample.admitted_version),
                )
            )

    def take(self) -> pa.RecordBatch:
        """Return the rows as one batch, and forget them."""
        plain = [f for f in SCHEMA if f.name not in ("components", "segments")]
        columns = list(zip(*self._rows, strict=True)) or [()] * len(plain)
        arrays = {f.name: pa.array(c, f.type) for f, c in zip(plain, columns, strict=True)}
        names, values = list(zip(*self._components, strict=True)) or ((), ())
        arrays["components"] = pa.MapArray.from_arrays(
            pa.array(self._component_ends, pa.int32()),
            pa.array(names, pa.string()),
            pa.array(values, pa.float64()),
        )
        fields = list(SCHEMA.field("segments").type.value_type)
        parts = list(zip(*self._segments, strict=True)) or [()] * len(fields)
        arrays["segments"] = pa.ListArray.from_arrays(
            pa.array(self._segment_ends, pa.int32()),
            pa.StructArray.from_arrays(
                [pa.array(c, f.type) for f, c in zip(fields, parts, strict=True)], fields=fields
            ),
        )
        self._clear()
        return pa.RecordBatch.from_arrays([arrays[name] for name in SCHEMA.names], schema=SCHEMA)

    def _add_segments(self, trajectory: Trajectory) -> tuple[str, int]:
        """Add the segments of a response. Return its text and its length."""
        for s in trajectory.segments:
            text = _clean(self._decode(s.tokens))
            self._segments.append((s.version, str(s.author), len(s.tokens), text))
        self._segment_ends.append(len(self._segments))
        if len(trajectory.segments) == 1:
            return text, len(s.tokens)
        # A character may begin in one segment and end in the next one.
        return _clean(self._decode(trajectory.tokens)), trajectory.num_tokens

    def _add_score(self, score: Score | None) -> tuple[float | None, float | None, str | None]:
        """Add the components of a score. Return reward, raw and answer."""
        if score is not None:
            self._components += [(_clean(k), float(v)) for k, v in score.extra.items()]
        self._component_ends.append(len(self._components))
        if score is None:
            return None, None, None
        return score.value, score.unshaped, None if score.answer is None else _clean(score.answer)


def _clean(text: str) -> str:
    return text if text.isascii() else sendable(text)


def _text(value: Any) -> str | None:
    """Return a ground truth as text. Anything but a text is JSON."""
    if value is None or isinstance(value, str):
        return value if value is None else _clean(value)
    return _clean(json.dumps(value, default=str, ensure_ascii=False))
