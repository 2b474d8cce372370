"""The stop of a run: its request, and the signals. The first one saves, a second ends the process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from millrace.errors import MillraceError
from millrace.observe.progress import Progress
from millrace.pipeline.sample_queue import SampleQueue
from millrace.run import supervised

T = TypeVar("T")

_stopped_by: int | None = None


def signal_exit_code() -> int | None:
    """Return 128 + the number of the signal that stopped the last run, or None."""
    return _stopped_by


class Interrupts:
    """The way of Ctrl-C to a run outside of the main thread, which alone gets signals."""

    def __init__(self) -> None:
        self._deliver: Callable[[], object] | None = None
        self._early = False

    def attach(self, loop: asyncio.AbstractEventLoop, on_signal: Callable[..., None]) -> None:
        """Call `on_signal` in `loop` for each interrupt from now on, and for an earlier one."""
        self._deliver = lambda: loop.call_soon_threadsafe(on_signal, signal.SIGINT)
        if self._early:
            self._deliver()

    def interrupt(self) -> None:
        """Interrupt the run. Any thread may call this."""
        self._early = True
        if self._deliver is not None:
            with suppress(RuntimeError):  # its loop has ended
                self._deliver()


async def with_signals(
    work: Coroutine[Any, Any, T],
    progress: Progress,
    request_stop: Callable[[], bool],
    interrupts: Interrupts | None = None,
) -> T:
    """Run `work`. The first Ctrl-C, SIGTERM or SIGHUP asks it to save and end, a second ends it.

    A second SIGHUP does not, and nohup's ignored SIGHUP stays ignored. A signal that a supervisor
    passes on counts once, also if it reached both processes. With `interrupts`, they take the place
    of signals, and a second one cancels `work`: the process is a notebook's.
    """
    global _stopped_by
    _stopped_by = None
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    heard = {"own": 0, "passed on": 0}

    def on_signal(number: signal.Signals, way: str = "own") -> None:
        global _stopped_by
        if _stopped_by is not None and number == signal.SIGHUP:
            return  # a terminal that closes sends it twice: the kernel and the shell
        most, heard[way] = max(heard.values()), heard[way] + 1
        if heard[way] <= most:
            return  # it has come the other way
        if _stopped_by is not None and interrupts is not None:
            task.cancel()
            return
        if _stopped_by is not None:
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h\n")  # show the cursor, which the progress display hides
                sys.stderr.flush()
            os._exit(128 + number)  # workers die with this process
        _stopped_by = 128 + number
        if request_stop():
            progress.note(
                f"{number.name}: saving a checkpoint, then ending. A second signal ends the run at "
                "once, without saving."
            )
        else:
            why = "No training is running, so no checkpoint is written."
            progress.note(f"{number.name}: ending. {why}")
            task.cancel()

    if interrupts is not None:
        interrupts.attach(loop, on_signal)
        return await task
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN and number == signal.SIGHUP:
            continue
        loop.add_signal_handler(number, on_signal, number)
    with supervised.stops(lambda number: on_signal(signal.Signals(number), "passed on")):
        return await task


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
