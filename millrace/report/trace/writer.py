"""RUN/trace: the events of each attempt as Chrome traces, which Perfetto opens.

    RUN/trace/attempt-001-000.json    the first file of the first attempt
    RUN/trace/attempt-001-001.json    the next one, which begins when the first one is full

A file is a JSON array with one event on each line. A killed run leaves it without its end, and
Perfetto opens it all the same. `report/trace/chrome.py` says what is drawn where.

The loop only appends to a queue. A thread packs the events, and a process draws and writes them:
drawing takes twenty times as long as packing, and a thread that draws holds up the loop. If the disk
is full, or too slow, the trace lacks events and the run loses nothing.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from millrace.codec import sendable
from millrace.observe.watch import Event
from millrace.report.trace import process
from millrace.report.trace.chrome import plain

_BATCH = 2048
"""Events that are packed at once, in less than a millisecond."""


class TraceWriter:
    """Writes the trace of one attempt. It never waits and never raises.

    Its limits: `limit_mb` MiB of all attempts' files, `file_mb` MiB of each file (it may exceed
    this by one batch), and `most_events` that wait for the disk. `close` waits for `close_s`.
    """

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        clock: Callable[[], float],
        note: Callable[[str], None],
        *,
        limit_mb: int = 512,
        file_mb: float = 128,
        most_events: int = 1_000_000,
        every_s: float = 0.5,
        close_s: float = 20.0,
    ) -> None:
        """`note` gets one line for each problem. The trace of a file begins at `clock()` now."""
        self.dropped = 0
        """Events that found the queue full."""
        self._folder, self._note, self._clock = run_dir / "trace", note, clock
        self._start = attempt, clock(), time.time(), limit_mb * 2**20, int(file_mb * 2**20)
        self._most, self._every_s, self._close_s = most_events, every_s, close_s
        self._events: deque[Event] = deque()
        self._lost = 0
        self._encode = msgspec.msgpack.Encoder(enc_hook=_known).encode
        self._process: subprocess.Popen[bytes] | None = None
        self._ended, self._closing, self._wake = False, False, threading.Event()
        self._thread = threading.Thread(target=self._work, name="trace", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if self._ended:
            return
        if len(self._events) >= (self._most // 2 if self._lost else self._most):
            self._lose()
            return
        if self._lost:
            lost, self._lost = self._lost, 0
            self._events.append(Event(event.time, "run", "gap", "at", "", {"events": lost}))
        self._events.append(_light(event) if event.name in _HEAVY else event)

    def close(self) -> None:
        """Write what waits, and end the file. Waits for at most `close_s`."""
        self._closing = True
        self._wake.set()
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            self._ended = True
            self._note(f"trace: its last {len(self._events)} events were not written in time")
            if self._process is not None:
                self._process.kill()
        self._events.clear()

    def _lose(self) -> None:
        if not self.dropped:
            self._note(
                f"warning: {self._folder} is too slow for the run: {self._most} events wait. "
                "The trace lacks some. The run does not wait for it."
            )
        self.dropped += 1
        self._lost += 1

    # -- in the thread

    def _work(self) -> None:
        try:
            self._process = process.start(self._folder, *self._start)
            with self._process as child:
                why = self._hand_over(child)
            if child.returncode and not why:
                why = f"its process ended with exit code {child.returncode}"
        except OSError as error:
            why = f"its process does not start: {error.strerror or error}"
        except Exception as error:  # noqa: BLE001 - a run does not end because its trace does
            why = f"{type(error).__name__}: {error}"
        if why and not self._ended:
            self._stop(why)

    def _hand_over(self, child: subprocess.Popen[bytes]) -> str:
        """Send all events to the process. Return why the trace ended before the run."""
        assert child.stdin is not None and child.stdout is not None
        with suppress(BrokenPipeError):
            last = False
            while not last:
                last = self._closing  # read before the last events are sent
                self._send(child.stdin, last)
                if not last:
                    self._wake.wait(self._every_s)
        with suppress(BrokenPipeError):
            child.stdin.close()
        return child.stdout.read().decode(errors="replace")

    def _send(self, pipe: Any, last: bool) -> None:
        """Send every event that waits, and the time."""
        events = self._events
        while True:
            batch = [events.popleft() for _ in range(min(_BATCH, len(events)))]
            rest = len(events) > 0
            process.send(pipe, self._packed(batch, last and not rest))
            if not rest:
                return

    def _packed(self, events: list[Event], last: bool) -> bytes:
        now = self._clock()
        try:
            return self._encode(process.Frame(now, events, last))
        except (OverflowError, TypeError, UnicodeEncodeError, RecursionError):
            events = [_sendable(event) for event in events]
            return self._encode(process.Frame(now, events, last))

    def _stop(self, why: str) -> None:
        self._ended = True
        self._events.clear()
        self._note(f"the trace in {self._folder} ends here: {why}. The run continues.")


_HEAVY = frozenset({"stepped", "equal_outcomes", "stats", "published"})
_OBJECTS = frozenset({"sample", "samples", "report", "stats", "totals"})


def _light(event: Event) -> Event:
    """Return the event without its objects. Samples that wait in the queue would fill the memory."""
    facts = {k: v for k, v in event.facts.items() if k not in _OBJECTS}
    if "samples" in event.facts:
        facts["samples"] = [sample.prompt.index for sample in event.facts["samples"]]
    if "report" in event.facts:
        facts["parts"] = event.facts["report"].seconds
    return Event(event.time, event.track, event.name, event.phase, event.key, facts)


def _known(value: object) -> Any:
    """Return what stands for an object of the run: nothing, unless it is a mapping."""
    return dict(value) if isinstance(value, Mapping) else None


def _sendable(event: Event) -> Event:
    """Return an event without what cannot be packed."""
    texts = (sendable(event.track), sendable(event.name), event.phase, sendable(event.key))
    return Event(event.time, *texts, plain(event.facts) or {})
