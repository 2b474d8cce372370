"""The driver's part of the wait graph: it answers, watches for a stall, reports it, and may stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from millrace.config import TrainerConfig
from millrace.errors import DeadlineError
from millrace.waits.answer import ProcessStatus
from millrace.waits.ask import ask
from millrace.waits.graph import DRIVER
from millrace.waits.verdict import StallWatch, Verdict, save
from millrace.waits.wait_server import FOLDER, WaitServer

_GRACE_S = 30.0
"""Seconds that a stopped run has to end. After that, its event loop is blocked for good."""


class Watchman:
    """Watches a run from the side thread of its driver."""

    def __init__(self, run: Path, config: TrainerConfig, note: Callable[[str], None]) -> None:
        self._run, self._config, self._note = run, config, note
        self.side = WaitServer(DRIVER)
        self.side.loop, self.side.look = asyncio.get_running_loop(), self._look
        self.stalled: Verdict | None = None
        """The stall that ends the run."""
        self.last: Verdict | None = None
        """The newest stall."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._stops_at: float | None = None
        self._watch = StallWatch(config.stall_s, self.ask, self._alarm)

    def ask(self) -> list[ProcessStatus]:
        return ask(self._run, [self.side.answer(), *self.side.more()])

    def _look(self, side: WaitServer) -> None:
        """Look once a second, in the side thread."""
        now = side.pulse.registry.clock()
        if self._stops_at is not None and now > self._stops_at:
            sys.stderr.write(f"error: {self.stalled.sentence if self.stalled else 'a stall'}\n")
            sys.stderr.flush()
            os._exit(1)  # The event loop does not run any more. Workers end with this process.
        if self._config.stall_s:
            still = min((still for _, still in side.pulse.look().values()), default=None)
            if still is not None and still < self._config.stall_s:
                self.last = None  # It moves again.
            self._watch.look(now, still)

    def _alarm(self, verdict: Verdict) -> None:
        path, self.last = None, verdict
        with contextlib.suppress(OSError):  # the disk may be what is stuck
            path = save(verdict, self._run)
        where = f" ({path})" if path is not None else ""
        rule = f"nothing has moved for trainer.stall_s = {self._config.stall_s:g} s"
        self._note(f"stall: {rule}: {verdict.sentence} Next: {verdict.next}.{where}")
        if self._config.on_stall == "stop" and self.stalled is None:
            self.stalled = verdict
            self._stops_at = self.side.pulse.registry.clock() + _GRACE_S
            if self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)


@contextlib.asynccontextmanager
async def watched(
    run: Path, config: TrainerConfig, note: Callable[[str], None]
) -> AsyncIterator[Watchman]:
    """Watch the body. A stall ends it with DeadlineError if trainer.on_stall=stop."""
    watchman, folder = Watchman(run, config, note), run / FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was killed
    try:
        watchman.side.start(folder)
    except OSError as error:
        note(f"`millrace why` cannot ask this run: {error}")
    try:
        yield watchman
    except asyncio.CancelledError:
        if (stalled := watchman.stalled) is None:
            raise
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        limit = f"trainer.stall_s = {config.stall_s:g}, trainer.on_stall=stop"
        raise DeadlineError(f"{stalled.sentence} Next: {stalled.next}. Limit: {limit}") from None
    except (DeadlineError, ExceptionGroup) as error:
        late = error if isinstance(error, DeadlineError) else error.subgroup(DeadlineError)
        if late is not None and watchman.last is not None:
            note(f"the deadline was missed because of this stall: {watchman.last.sentence}")
        raise
    finally:
        watchman.side.close()
        shutil.rmtree(folder, ignore_errors=True)  # the workers have ended
