"""RUN/history.jsonl: the samples of each version, over all attempts at a run, and their audit.

Each attempt has one line for its start, one for each version and one for its end. Each line is on
disk before the next step begins, unless the disk is full: it then waits in memory, and no
checkpoint is completed before it is written. An attempt that starts at version v supersedes the
lines of earlier attempts after v. The remaining lines are the surviving history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from millrace.errors import CheckpointError
from millrace.observe.files import Appender, Tail, drop_unfinished_line
from millrace.persist.ownership import disk_errors
from millrace.schedule.ledger import Totals

FILE = "history.jsonl"

Count = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
"""A number or an id. A line with a larger one is not readable."""
Version = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event. `admitted`, `dropped` and `slots` are the ledger's values at that moment."""

    event: str
    """One of start, version and end."""
    attempt: Count
    version: Version
    admitted: Count = 0
    dropped: dict[str, Count] = {}
    slots: list[Count] = msgspec.field(default=[], name="held")
    trained: list[Count] = []
    complete: bool = False
    retired: Count = 0


DECODER = msgspec.json.Decoder(Line)  # made now, for threads: see waits/ask.py


class Audit(msgspec.Struct, frozen=True):
    """The account of every sample in the surviving history."""

    admitted: int
    trained: int
    dropped: dict[str, int]
    in_flight: int
    lost: int
    trained_twice: int
    attempts: int
    versions: int
    complete: bool


class History:
    """The writer of a run's history."""

    def __init__(self, run_dir: Path, totals: Totals) -> None:
        self._path = run_dir / FILE
        with disk_errors(self._path):
            mend(run_dir)
            lines = read(run_dir)
            self._file = Appender(self._path, durable=True)
        self.attempt = max((line.attempt for line in lines), default=0) + 1
        self._append("start", totals, [])

    def version(self, totals: Totals, trained: list[int]) -> None:
        """Write a version. Raises DiskError if its line must wait. A later one tries again."""
        self._append("version", totals, trained)

    def end(self, totals: Totals, complete: bool) -> None:
        self._append("end", totals, [], complete)

    def catch_up(self) -> None:
        """Write the lines that wait. Raises DiskError. A checkpoint is never newer than they are."""
        with disk_errors(self._path):
            self._file.catch_up()

    def _append(self, event: str, now: Totals, trained: list[int], complete: bool = False) -> None:
        line = Line(
            event,
            self.attempt,
            now.version,
            now.admitted,
            now.dropped,
            now.slots,
            trained,
            complete,
            now.retired,
        )
        with disk_errors(self._path):
            self._file.add(msgspec.json.encode(line) + b"\n")


def read(run_dir: Path) -> list[Line]:
    """Return the lines of the history, oldest first. Raises CheckpointError for a damaged one.

    A last line without a newline is ignored. It is still being written, or a crash cut it off.
    """
    tail = Tail(run_dir / FILE, DECODER)
    _, lines = tail.read()
    if tail.error:
        raise tail.error
    if tail.damage:
        raise CheckpointError(f"{tail.path}, {tail.damage}")
    return lines


def mend(run_dir: Path) -> None:
    """Remove a last line that a crash left unfinished. Its event does not count."""
    path = run_dir / FILE
    if path.is_file():
        drop_unfinished_line(path)


def surviving(lines: Iterable[Line]) -> list[Line]:
    """Return the lines without those that a later attempt supersedes."""
    kept: list[Line] = []
    for line in lines:
        if line.event == "start":
            kept = [earlier for earlier in kept if earlier.version <= line.version]
        kept.append(line)
    return kept


def audit(run_dir: Path) -> Audit:
    """Account for every sample that was ever admitted in the surviving history."""
    return audit_of(read(run_dir))


def audit_of(lines: Sequence[Line]) -> Audit:
    """Return the audit of the lines of a history."""
    kept = surviving(lines)
    if not kept:
        return Audit(0, 0, {}, 0, 0, 0, 0, 0, False)
    last = kept[-1]
    # Another run trained these samples, before the checkpoint from which this run began.
    inherited = kept[0].retired
    trained = Counter(i for line in kept if line.event == "version" for i in line.trained)
    # An id outside the admitted range must not hide a lost sample.
    known = {i for i in trained.keys() | set(last.slots) if 0 <= i < last.admitted}
    accounted = inherited + len(known) + sum(last.dropped.values())
    return Audit(
        admitted=last.admitted,
        trained=inherited + len(trained),
        dropped=last.dropped,
        in_flight=len(last.slots),
        lost=max(0, last.admitted - accounted),
        trained_twice=sum(count - 1 for count in trained.values())
        + len(trained.keys() & set(last.slots)),
        attempts=max(line.attempt for line in lines),
        versions=last.version,
        complete=last.event == "end" and last.complete,
    )
