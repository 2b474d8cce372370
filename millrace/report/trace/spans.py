"""The spans of a run, read from the traces of all its attempts.

A file may be half-written, damaged or not millrace's. What cannot be read is left out.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec

from millrace.observe.files import CHUNK, files_in, open_regular
from millrace.report.trace.writer import HEADER, NAME


class Span(msgspec.Struct):
    """A span of a track, or a moment with `start == end`.

    The begin's facts and the end's facts are together. A span without an end lasts until the last
    event of its attempt, and has the fact `open`. A span whose end the trace lost has `gap`.
    """

    attempt: int
    track: str
    name: str
    key: str
    start: float
    """Seconds since the start of the first attempt, also for later attempts."""
    end: float
    facts: dict[str, Any]


class _Line(msgspec.Struct, gc=False):
    """A line of a file. Its fields may have any value."""

    pid: int
    tid: int
    ph: str
    ts: float
    dur: float = 0.0
    cat: str = ""
    name: str = ""
    args: dict[str, Any] = {}


class _Header(msgspec.Struct):
    unix_s: float
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    file: int


_FAR = 2.0**53
"""Microseconds that no run takes."""
_decode = msgspec.json.Decoder(_Line).decode


def read(run_dir: Path) -> list[Span]:
    """Return the spans of a run by start."""
    attempts: dict[int, list[tuple[int, Path]]] = {}
    for path in files_in(run_dir / "trace", NAME):
        if match := NAME.fullmatch(path.name):
            attempts.setdefault(int(match[1]), []).append((int(match[2]), path))
    spans: list[Span] = []
    zero: float | None = None
    for _, files in sorted(attempts.items()):
        reader = _Attempt()
        for _, path in sorted(files):
            reader.read(path)
        if reader.header is not None:
            zero = reader.header.unix_s if zero is None else zero
            spans += reader.end(reader.header.unix_s - zero)
    spans.sort(key=lambda span: span.start)
    return spans


class _Attempt:
    """Reads the files of one attempt, in order."""

    def __init__(self) -> None:
        self.header: _Header | None = None
        self._names: dict[int, str] = {}
        self._spans: list[Span] = []
        """In microseconds since the clock's zero."""
        self._open: dict[int, Span] = {}
        self._cut: dict[int, Span] = {}
        """Spans that continue in the next file."""
        self._last = 0.0

    def read(self, path: Path) -> None:
        try:
            with open_regular(path) as file:
                file.readline(CHUNK)
                if not self._starts(file.readline(CHUNK)):
                    return
                while (text := file.readline(CHUNK)) and len(text) < CHUNK:
                    # The end of the array, or a line that a crash cut off, is no line.
                    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                        self._add(_decode(text.rstrip(b",\n")))
        except OSError:
            return

    def _starts(self, text: bytes) -> bool:
        """Read the first event. Return whether the file belongs to this attempt."""
        try:
            line = _decode(text.rstrip(b",\n"))
            header = msgspec.convert(line.args, _Header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        same = self.header is None or self.header.unix_s == header.unix_s
        if line.name != HEADER or not same:
            return False
        self.header = header
        return True

    def _add(self, line: _Line) -> None:
        phase = line.ph
        if phase == "M" and line.name == "process_name":
            self._names[line.pid] = str(line.args.get("name", ""))
        far = not abs(line.ts) + abs(line.dur) < _FAR
        if phase == "M" or line.pid not in self._names or far:
            return
        if phase == "B":
            if line.args.get("continued") is True and line.tid in self._cut:
                self._open[line.tid] = self._cut.pop(line.tid)
            else:
                self._open[line.tid] = self._begin(line)
        elif phase == "E":
            closed = self._open.pop(line.tid, None)
            if closed is None:
                pass
            elif line.args.get("continues") is True:
                self._cut[line.tid] = closed
            else:
                closed.end = line.ts
                if line.args:
                    closed.facts = closed.facts | line.args
        elif phase in "Xi":
            whole = self._begin(line)
            if line.name == "relabelled":
                self._relabel(whole)
        self._last = max(self._last, line.ts + line.dur)

    def _begin(self, line: _Line) -> Span:
        name, attempt = line.cat or line.name, self.header.attempt if self.header else 0
        key, end = line.name[len(line.cat) + 1 :] if line.cat else "", line.ts + line.dur
        span = Span(attempt, self._names[line.pid], name, key, line.ts, end, line.args)
        self._spans.append(span)
        return span

    def _relabel(self, about: Span) -> None:
        """Rename the waits that ended just before: their name was known only at their end."""
        source, target, left = (about.facts.get(k) for k in ("source", "target", "seconds"))
        if not isinstance(left, int | float):
            return
        for one in islice(reversed(self._spans), 1, None):
            if left <= 1e-5 or one.name == "step":
                return
            if one.track == about.track and one.name == source:
                left -= (one.end - one.start) / 1e6
                one.name = str(target)

    def end(self, shift: float) -> list[Span]:
        """Return the spans in seconds, `shift` seconds later than in the files."""
        for one in (*self._open.values(), *self._cut.values()):
            one.end, one.facts = max(one.start, self._last), one.facts | {"open": True}
        for one in self._spans:
            one.start, one.end = one.start / 1e6 + shift, one.end / 1e6 + shift
        return self._spans
