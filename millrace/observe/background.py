"""A sink that hands its rows to a tracker in a thread, so that no tracker can delay the run."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from millrace.errors import redact

Row = dict[str, float]


class Tracker(Protocol):
    """A tracker is made, written and closed in one thread. Each call may fail or hang."""

    where: str
    """Where a user finds the run."""

    def write(self, version: int, row: Row) -> None: ...

    def close(self, complete: bool) -> None: ...


class Background:
    """A sink that hands rows to a tracker in a thread.

    `write` never waits. `close` waits for at most `close_s`. Neither raises.

    A tracker that cannot start tries again until the run ends. Rows wait for it. A row is dropped
    if the tracker refuses it, and if too many rows wait.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Tracker],
        note: Callable[[str], None],
        *,
        most_rows: int = 1000,
        close_s: float = 10.0,
        share: float = 1.0,
        pause_s: float = 0.0,
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        """`abandon` is called if the tracker does not end in time.

        Rows that wait are written together. Then the thread rests for `pause_s` or longer, so that
        writing takes at most `share` of a processor. It does not rest while a tenth of `most_rows`
        wait, or at the end.
        """
        self.name, self.dropped = name, 0
        self._start, self._note, self._abandon = start, note, abandon
        self._most_rows, self._close_s = most_rows, close_s
        self._share, self._pause_s = share, pause_s
        self._rows: SimpleQueue[tuple[int, Row] | None] = SimpleQueue()
        self._closing, self._complete, self._warned = threading.Event(), False, False
        self._end = 0.0
        self._unwritten = 0
        """Rows that wait, with the one that the tracker writes."""
        self._lock = threading.Lock()
        # Python's exit would wait for the thread of an executor, also if the tracker hangs.
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def write(self, version: int, row: Row) -> None:
        with self._lock:
            full = self._unwritten >= self._most_rows
            self.dropped += full
            self._unwritten += not full
        if full:
            self._warn(f"{self._most_rows} rows wait for it")
        else:
            self._rows.put((version, row))

    def idle(self) -> bool:
        """Return whether the tracker has written every row."""
        return not self._unwritten

    def finish(self, complete: bool) -> None:
        """Ask the tracker to end, and do not wait for it."""
        if not self._closing.is_set():
            self._complete = complete
            self._rows.put(None)
            self._closing.set()
            self._end = time.monotonic() + self._close_s

    def close(self, complete: bool = True) -> None:
        """Wait for the tracker until `close_s` after it was first asked to end."""
        self.finish(complete)
        self._thread.join(max(0.0, self._end - time.monotonic()))
        late = ""
        if self._thread.is_alive():
            late, self._warned = f" It did not end within {self._close_s:g} s.", True
            self._abandon()
        if (lost := self.dropped + self._unwritten) or late:
            self._note(
                f"{self.name}:{late} It lacks {lost} rows of this run. metrics.jsonl has them."
            )

    def _work(self) -> None:
        tracker, spent_s = self._open(), 0.0
        while tracker is not None and (item := self._rows.get()) is not None:
            begin = time.thread_time()
            failed = not self._works(tracker.write, *item)
            with self._lock:
                self._unwritten -= 1
                self.dropped += failed
            spent_s += time.thread_time() - begin
            if self._rows.empty() or spent_s >= self._share * self._pause_s:
                if self._unwritten <= self._most_rows // 10:
                    self._closing.wait(max(self._pause_s, spent_s * (1 / self._share - 1)))
                spent_s = 0.0
        if tracker is not None:
            self._works(tracker.close, self._complete)

    def _works(self, call: Callable[..., None], *args: object) -> bool:
        try:
            call(*args)
        except BaseException as error:  # noqa: BLE001 - the boundary to a library
            self._warn(text_of(error))
            return False
        return True

    def _open(self) -> Tracker | None:
        """Start the tracker. Returns None if that fails until the run ends."""
        wait_s = 1.0
        while True:
            try:
                tracker = self._start()
            except BaseException as error:  # noqa: BLE001 - the boundary to a library
                self._warn(text_of(error))
            else:
                self._note(f"{self.name}: {tracker.where}")
                return tracker
            if self._closing.wait(wait_s):
                return None
            wait_s = min(60.0, 2 * wait_s)

    def _warn(self, why: str) -> None:
        """Print the first problem of the run. Later ones only count dropped rows."""
        if not self._warned:
            self._warned = True
            self._note(f"warning: {self.name} does not work: {why}. The run does not wait for it.")


def text_of(error: BaseException) -> str:
    """Return the first line of an error, without secrets and without the password of a URL."""
    line = next(iter(redact(str(error)).splitlines()), "").rstrip(".")
    return f"{type(error).__name__}: " + re.sub(r"//[^/\s]+@", "//***@", line)[:200]
