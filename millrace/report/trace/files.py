"""The files of one attempt's trace: their lines, their sizes, and their ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.report import folders
from millrace.report.trace.chrome import Translator
from millrace.report.trace.lanes import Line

NAME = re.compile(r"attempt-(\d{3,9})-(\d{3,9})\.json")
HEADER = "clock_zero"
"""The name of the first event of a file. Its args are the Unix time of zero, and the attempt."""

_BATCH = 256
"""Events whose lines are written at once."""
_LONG_S = 1.0
"""A slice that is open for longer gets a line for its begin."""
_SEPARATOR = b",\n"
_END = b"\n]\n"


class TraceIsFull(Exception):
    """The files of all attempts have reached their limit."""


class TraceFiles:
    """Writes the events of one attempt. Raises OSError and TraceIsFull."""

    def __init__(
        self, folder: Path, attempt: int, zero: float, unix_s: float, limit: int, full: int
    ) -> None:
        """`zero` is the run's clock at the Unix time `unix_s`.

        `limit` bytes are for all attempts together, and `full` for one file, which may exceed them
        by one batch.
        """
        self._folder, self._attempt, self._unix = folder, attempt, unix_s
        self._limit, self._full = limit, full
        self._translator, self._last = Translator(zero), zero
        self._encoder = msgspec.json.Encoder()
        self._number, self._size = 0, 0
        self._total = folders.size(folders.files(folders.own(folder), NAME))
        self._begin([])

    def add(self, events: Sequence[Sequence[Any]], now: float) -> None:
        """Write events, and the begins of long slices, which a kill must not lose."""
        translator = self._translator
        for k in range(0, len(events), _BATCH):
            lines: list[Line] = []
            for event in events[k : k + _BATCH]:
                self._last = event[0]
                translator.add(event, lines)
            self._write(lines)
            if self._size >= self._full:
                ends, heads = translator.cut(translator.ts(self._last))
                self._write(ends)
                self._end()
                self._begin(heads)
        lines = []
        translator.write_begun(translator.ts(now - _LONG_S), lines)
        self._write(lines)

    def finish(self, now: float) -> None:
        """End every slice, and the file."""
        last: list[Line] = []
        self._translator.end_all(self._translator.ts(now), last, {"open": True})
        self._write(last)
        self._end()

    def _begin(self, heads: list[Line]) -> None:
        """Open the first file whose name is free. No file is overwritten."""
        while True:
            path = self._folder / f"attempt-{self._attempt:03d}-{self._number:03d}.json"
            try:
                self._file: Any = path.open("xb", buffering=0)
                break
            except FileExistsError:
                self._number += 1
        args = {"unix_s": self._unix, "attempt": self._attempt, "file": self._number}
        header = Line(0, 0, "M", 0, name=HEADER, args=args)
        self._size = 0
        self._put(b"[\n" + self._encode([header, *heads]))

    def _end(self) -> None:
        with self._file:
            self._put_all(_END)

    def _write(self, lines: list[Line]) -> None:
        if lines:
            self._put(_SEPARATOR + self._encode(lines))

    def _encode(self, lines: list[Line]) -> bytes:
        return _SEPARATOR.join(map(self._encoder.encode, lines))

    def _put(self, data: bytes) -> None:
        if self._total + len(data) > self._limit:
            self._end()
            raise TraceIsFull
        self._put_all(data)
        self._size += len(data)
        self._total += len(data)

    def _put_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
