"""The wish to stop a run: Ctrl-C and SIGTERM, as the run sees them."""

from __future__ import annotations

from collections.abc import Callable

from millrace.pipeline.sample_queue import SampleQueue


class StopRequest:
    """One run's stop: it may come before there is anything to stop."""

    def __init__(self) -> None:
        self.requested = False
        self._queue: SampleQueue | None = None
        self._grace_s = 0.0
        self._abandon: Callable[[], None] = lambda: None

    def attach(self, queue: SampleQueue, grace_s: float, abandon: Callable[[], None]) -> None:
        """From here on a stop ends the run at its next cut, and `abandon` ends a validation."""
        self._queue, self._grace_s, self._abandon = queue, grace_s, abandon
        if self.requested:
            self.request()

    def detach(self) -> None:
        """From here on there is nothing to save."""
        self._queue = None

    def request(self) -> bool:
        """Ask for a stop. Returns whether a training loop will see to it."""
        self.requested = True
        if self._queue is not None:
            self._queue.stop(self._grace_s)
            self._abandon()
        return self._queue is not None
