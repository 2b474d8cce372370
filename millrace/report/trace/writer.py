"""RUN/trace: the events of each attempt as Chrome traces, which Perfetto opens.

    RUN/trace/attempt-001-000.json    the first file of the first attempt
    RUN/trace/attempt-001-001.json    the next one, which begins when the first one is full

A file is a JSON array with one event on each line. A killed run leaves it without its end, and
Perfetto opens it all the same. `report/trace/chrome.py` says what is drawn where.

The loop appends events to a queue. A thread encodes and writes. If
the disk is full, or too slow, the trace lacks events and the run loses nothing. If the thread takes more
of a core than it may, one sample in 2, 4, ... 64 is drawn: with its states, its requests and its
scores, or not at all. Requests and scores of validations are chosen in the same way. The loop chooses,
because an event that waits in a queue costs more than one that is thrown away.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from millrace.observe.files import files_in, make_folder, size_of
from millrace.report.accounts import VALIDATION
from millrace.report.trace.chrome import (
    CALLS,
    ENDS,
    OPEN,
    SAMPLES,
    STATES,
    Line,
    Translator,
    as_json,
)
from millrace.waits.registry import Event

NAME = re.compile(r"attempt-(\d{3,9})-(\d{3,9})\.json")
HEADER = "clock_zero"
"""The name of the first event of a file. Its args are the Unix time of zero, and the attempt."""

_BATCH = 256
"""Events that are encoded at once. A write releases the interpreter after each batch."""
_WINDOW_S, _QUIET = 2.0, 5
"""The load of the thread is the mean over a window of seconds. After some quiet windows more is drawn."""
MOST_EVERY = 64
"""At least one sample in so many is drawn."""

_ALL = 2**32 - 1
"""The largest hash."""
_SEPARATOR = b",\n"
_END = b"\n]\n"


class SampleChoice:
    """Chooses the samples that are drawn. All of it runs on the event loop, but `adapt`."""

    def __init__(self, most: float = 1.0) -> None:
        """`most` is the load from which on fewer samples are drawn. 1 draws them all."""
        self._most, self._every, self._quiet = most, 1, 0
        self._since: tuple[float, float, int] | None = None
        self.calls = 0
        """All requests and scores so far."""
        self._least = _ALL
        """A sample is drawn if the hash of its number is not above this."""
        self._samples: set[str] = set()
        """The samples in slots that are drawn. One that has begun to be drawn is drawn to its end."""
        self._running: dict[str, int] = {}
        """How many calls of a key run and are drawn. Scores of one sample share a key."""

    def draw(self, every: int) -> None:
        """Draw one sample in `every` from now on. A larger number draws some of the same samples."""
        self._every, self._least = every, _ALL // every

    def adapt(self, now: float, used: float) -> int | None:
        """Draw more or fewer samples by the load of the thread. Return the number if it changes.

        `now` is a clock, `used` the processor time of the thread, both in seconds. A time without any
        call, such as the trainer's turn, says nothing.
        """
        since, before, counted = self._since or (now, used, self.calls)
        if self._since is None or self.calls == counted:
            self._since = now, used, self.calls
        if now - since < _WINDOW_S or self.calls == counted or self._most >= 1:
            return None
        load, every = (used - before) / (now - since), self._every
        self._since = now, used, self.calls
        # Twice as many samples take at most twice the time.
        self._quiet = self._quiet + 1 if load < self._most / 4 else 0
        if load > self._most:
            self.draw(min(2 * every, MOST_EVERY))
        elif self._quiet >= _QUIET:
            self._quiet = 0
            self.draw(max(every // 2, 1))
        return self._every if self._every != every else None

    def moves(self, name: str, key: str) -> bool:
        """Return whether an event of a sample is drawn."""
        if key in self._samples:
            if name in ENDS:
                self._samples.remove(key)
            return True
        chosen = self._chosen(key)
        if chosen and name in STATES:
            self._samples.add(key)
        return chosen

    def calls_for(self, phase: str, key: str) -> bool:
        """Return whether the begin or the end of a request or a score is drawn."""
        running = self._running
        if phase == "begin":
            self.calls += 1
            number = key[len(VALIDATION) :] if key.startswith(VALIDATION) else key
            sample = number.partition("/")[0]
            if sample not in self._samples and not self._chosen(sample):
                return False
            running[key] = running.get(key, 0) + 1
            return True
        if key not in running:
            return False
        running[key] -= 1
        if not running[key]:
            del running[key]
        return True

    def _chosen(self, number: str) -> bool:
        # A remainder instead of a hash would be biased if every second row is easy.
        return crc32(number.encode("utf-8", "replace")) <= self._least


class TraceWriter:
    """Writes the trace of one attempt. It never waits and never raises.

    Its limits: `limit_mb` MiB of all attempts' files, `file_mb` MiB of each file (it may exceed
    this by one batch), `most_events` that wait for the disk, and `load` of a core. `close` waits
    for `close_s`.
    """

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        clock: Callable[[], float],
        note: Callable[[str], None],
        *,
        limit_mb: float = 512,
        load: float = 1.0,
        states: Callable[[float], Iterable[Event]] = lambda now: (),
        file_mb: float = 128,
        most_events: int = 1_000_000,
        every_s: float = 0.5,
        close_s: float = 20.0,
    ) -> None:
        """`note` gets one line for each problem. The trace of a file begins at `clock()` now.

        `states(now)` are the states in which the tracks are now, for after a gap in the trace.
        """
        self.dropped = 0
        """Events that found the queue full."""
        self._folder, self._attempt, self._note = run_dir / "trace", attempt, note
        self._clock, self._unix, zero = clock, time.time(), clock()
        self._translator, self._last = Translator(zero), zero
        self._limit, self._full = int(limit_mb * 2**20), int(file_mb * 2**20)
        self._most, self._every_s, self._close_s = most_events, every_s, close_s
        self._choice = SampleChoice(load)
        self._states = states
        self._events: deque[Event] = deque()
        self._lost, self._lost_since = 0, 0.0
        self._encoder = msgspec.json.Encoder()
        self._file: Any = None
        self._number, self._size, self._total = 0, 0, 0
        self._thinned = False
        self._ended, self._closing, self._wake = False, False, threading.Event()
        self._thread = threading.Thread(target=self._work, name="trace", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Write an event, if it is drawn."""
        if self._ended:
            return
        _, track, name, phase, key, _ = event
        if name in CALLS:
            if not self._choice.calls_for(phase, key):
                return
        elif track == SAMPLES and not self._choice.moves(name, key):
            return
        self.put(event)

    def put(self, event: Event) -> None:
        """Write an event."""
        if self._ended:
            return
        if len(self._events) >= (self._most // 2 if self._lost else self._most):
            self._lose(event.time)
            return
        if self._lost:
            self._gap()
            self._events.extend(self._states(event.time))
        self._events.append(_light(event) if event.name in _HEAVY else event)

    def close(self) -> None:
        """Write what waits, and end the file. Waits for at most `close_s`."""
        if self._lost:
            self._gap()
        self._closing = True
        self._wake.set()
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            self._ended = True
            self._note(f"trace: its last {len(self._events)} events were not written in time")
        self._events.clear()

    def _gap(self) -> None:
        lost, self._lost = self._lost, 0
        self._events.append(Event(self._lost_since, "run", "gap", "at", "", {"events": lost}))

    def _lose(self, time: float) -> None:
        if not self.dropped:
            self._note(
                f"warning: {self._folder} is too slow for the run: {self._most} events wait. "
                "The trace lacks some. The run does not wait for it."
            )
        if not self._lost:
            self._lost_since = time
        self.dropped += 1
        self._lost += 1

    # -- in the thread

    def _work(self) -> None:
        try:
            self._total = size_of(files_in(make_folder(self._folder), NAME))
            self._begin_file([])
            closing = False
            while not (closing or self._ended):
                closing = self._closing  # read before the last events are written
                self._drain()
                self._translator.write_begun(self._clock())
                self._write()
                self._thin()
                if not closing:
                    self._wake.wait(self._every_s)
            if not self._ended:
                self._translator.end_all(self._clock(), OPEN)
                self._write()
            self._end_file()
        except OSError as error:
            self._abandon(f"it cannot be written: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - a run does not end because its trace does
            self._abandon(f"{type(error).__name__}: {error}")

    def _drain(self) -> None:
        """Write every event that waits."""
        events, begun = self._events, self._last
        while events and not self._ended:
            for _ in range(min(_BATCH, len(events))):
                event = events.popleft()
                self._last = event.time
                self._translator.add(event)
            self._write()
            self._thin()
            if self._last - begun >= self._every_s:
                begun = self._last
                self._translator.write_begun(begun)
                self._write()
            if self._size >= self._full and not self._ended:
                heads = self._translator.cut(self._last)
                self._write()
                self._end_file()
                if not self._ended:
                    self._begin_file(heads)

    def _thin(self) -> None:
        """Draw fewer samples if the thread takes too much, and more if it may."""
        every = self._choice.adapt(time.monotonic(), time.thread_time())
        if every is None or self._ended:
            return
        self._translator.add(Event(self._last, "run", "thinned", "at", "", {"every": every}))
        self._write()
        if not (self._thinned or self._ended):
            self._thinned = True
            self._note(
                "this run is fast: its trace shows some samples only. Training is not affected. "
                "report.trace_load=1 shows all; see docs/trace.md"
            )

    def _begin_file(self, heads: list[Line]) -> None:
        """Open the first file whose name is free. No file is overwritten, and none is empty."""
        while True:
            args = {"unix_s": self._unix, "attempt": self._attempt, "file": self._number}
            header = Line(0, 0, "M", 0, name=HEADER, args=as_json(args))
            data = b"[\n" + self._encode([header, *heads])
            if not self._fits(data):
                return
            path = self._folder / f"attempt-{self._attempt:03d}-{self._number:03d}.json"
            try:
                self._file = path.open("xb", buffering=0)
            except FileExistsError:
                self._number += 1
            else:
                self._size = 0
                self._put(data)
                return

    def _end_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with file:
                _write_all(file, _END)

    def _write(self) -> None:
        if (lines := self._translator.take()) and not self._ended:
            self._put(_SEPARATOR + self._encode(lines))

    def _encode(self, lines: list[Line]) -> bytes:
        return _SEPARATOR.join(map(self._encoder.encode, lines))

    def _put(self, data: bytes) -> None:
        if self._fits(data):
            _write_all(self._file, data)
            self._size += len(data)
            self._total += len(data)

    def _fits(self, data: bytes) -> bool:
        """Return whether there is room for `data`. If not, end the trace."""
        fits = self._total + len(data) <= self._limit
        if not fits:
            self._stop(
                f"the traces of all attempts have {self._limit >> 20} MiB. "
                "report.trace_mb sets this limit"
            )
        return fits

    def _stop(self, why: str) -> None:
        self._ended = True
        self._events.clear()
        self._note(f"the trace in {self._folder} ends here: {why}. The run continues.")

    def _abandon(self, why: str) -> None:
        """End a trace whose file cannot be written."""
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()
        self._stop(why)


def _write_all(file: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


_HEAVY = frozenset({"stepped", "equal_outcomes"})


def _light(event: Event) -> Event:
    """Return the event without its samples. Samples that wait in the queue would fill the memory."""
    facts = {k: v for k, v in event.facts.items() if k not in ("sample", "samples", "report")}
    if "samples" in event.facts:
        facts["samples"] = [sample.prompt.index for sample in event.facts["samples"]]
    if "report" in event.facts:
        facts["parts"] = event.facts["report"].seconds
    return Event(event.time, event.track, event.name, event.phase, event.key, facts)
