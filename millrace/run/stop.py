"""The request to stop a run, from Ctrl-C, SIGTERM or SIGHUP."""

from __future__ import annotations

from collections.abc import Callable

from millrace.errors import MillraceError
from millrace.pipeline.sample_queue import SampleQueue


class StopRequest:
    """The stop of one run. It may come before training begins."""

    def __init__(self) -> None:
        self.requested = False
        self.error: MillraceError | None = None
        """The error with which the run ends, once it has stopped."""
        self._queue: SampleQueue | None = None
        self._grace_s = 0.0
        self._abandon: Callable[[], None] = lambda: None

    def attach(self, queue: SampleQueue, grace_s: float, abandon: Callable[[], None]) -> None:
        """Connect to a training run.

        A stop then ends the run after its window, or after `grace_s` seconds. It also calls
        `abandon`, which ends a running validation.
        """
        self._queue, self._grace_s, self._abandon = queue, grace_s, abandon
        if self.requested:
            self.request()

    def detach(self) -> None:
        """Disconnect from the training run: it has nothing left to save."""
        self._queue = None

    def request(self) -> bool:
        """Request a stop. Returns whether a training loop handles it."""
        self.requested = True
        if self._queue is not None:
            self._queue.stop(self._grace_s)
            self._abandon()
        return self._queue is not None
