"""Decides that a run stands still, names the culprit and saves what all processes say."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from millrace.waits.answer import ProcessStatus
from millrace.waits.verdict import PATIENCE_S, Verdict, judge, report

MOST_FILES = 10
"""Stalls of a run that are saved."""


class StallWatch:
    """Looks at what moves, and raises the alarm once nothing has moved for `stall_s` seconds.

    The driver's counters come first, because they cost nothing. The others are asked only when the
    driver's stand still. After an alarm, the next one comes after twice the time.
    """

    def __init__(
        self,
        stall_s: float,
        ask: Callable[[], Sequence[ProcessStatus]],
        alarm: Callable[[Verdict], None],
    ) -> None:
        self._stall_s = stall_s
        self._ask, self._alarm = ask, alarm
        self._next = 0.0
        self._alarms = 0
        self._began: float | None = None

    def look(self, now: float, own_still_s: float | None) -> None:
        """Look once. `own_still_s` is the time since a counter of the driver has moved.

        It is None while the driver counts nothing. The time since the first look counts then.
        """
        self._began = now if self._began is None else self._began
        own_still_s = now - self._began if own_still_s is None else own_still_s
        if own_still_s < self._stall_s:
            self._alarms = 0
            return
        if now < self._next:
            return
        answers = self._ask()
        stills = [still for a in answers if (still := a.still_s) is not None]
        quiet = min(stills, default=own_still_s)
        if quiet < self._stall_s:  # Slow is not stuck: a worker moves.
            self._next = now + self._stall_s - quiet
            return
        self._alarms += 1
        self._next = now + self._stall_s * 2**self._alarms
        self._alarm(judge(answers, min(PATIENCE_S, self._stall_s)))


def save(verdict: Verdict, run: Path) -> Path | None:
    """Save a verdict as stall-TIME.txt and .json. Return the text, or None if there are enough."""
    if len(list(run.glob("stall-*.txt"))) >= MOST_FILES:
        return None
    path = run / f"stall-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    path.write_text(report(verdict))
    path.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(verdict)))
    return path
