"""The advice in a live view: the same sentences as in the report, computed seldom."""

from __future__ import annotations

import time
from collections.abc import Callable

from millrace.persist.run_reader import RunReader
from millrace.report.advice.advise import advise_run
from millrace.report.live.look import RunSnapshot

REST_S = 10.0
"""The least seconds between two computations."""
REST = 20.0
"""The multiple of a computation's own time that must pass before the next one."""


def advice(run: RunReader) -> list[str]:
    """Return the sentences on a run. Only this function asks for them in live views."""
    return [str(one) for one in advise_run(run)]


class AdviceCache:
    """The advice on a run, computed again only when it has new versions, and seldom."""

    def __init__(
        self,
        run: RunReader,
        clock: Callable[[], float] = time.monotonic,
        advise: Callable[[RunReader], list[str]] = advice,
    ) -> None:
        self._run, self._clock, self._advise = run, clock, advise
        self._about: tuple[int, int, str] | None = None
        self._due, self._said = float("-inf"), list[str]()

    def on(self, look: RunSnapshot) -> list[str]:
        """Return the sentences on the run as it is now."""
        about, begin = (look.attempt, look.version, look.state), self._clock()
        if about != self._about and (look.ended or begin >= self._due):
            try:
                self._said = self._advise(self._run)
            except Exception as error:  # noqa: BLE001 - the view goes on without advice
                self._said = [f"none: {type(error).__name__}: {error}"]
            self._about = about
            self._due = begin + max(REST_S, REST * (self._clock() - begin))
        return self._said
