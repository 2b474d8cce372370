"""Advice on a run: the keys that would make it faster, or why none is known.

A part of the group `advice` computes it, for several seconds. So a moment of a run is computed once
in a process, and a run that goes on is computed seldom and in the background.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

from millrace.config import plugins
from millrace.errors import ConfigError
from millrace.persist.run_reader import RunReader

REST_S = 60.0
"""The least seconds between two computations for a run that goes on."""
REST = 20.0
"""The multiple of a computation's own time that must pass before the next one."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence of advice."""

    text: str
    overrides: tuple[str, ...] = ()
    """The `key=value` that it names, in order. Empty if there is no advice."""
    gain: float | None = None
    """The predicted change of the trained samples per second, as a share."""
    low: float = 0.0
    high: float = 0.0
    """The interval of the gain."""

    @property
    def keys(self) -> set[str]:
        return {line.partition("=")[0] for line in self.overrides}

    def __str__(self) -> str:
        if self.gain is None:
            return self.text
        return f"{self.text} ({self.gain:+.0%}, from {self.low:+.0%} to {self.high:+.0%})"


def none(why: str) -> list[Advice]:
    return [Advice(f"none: {why}")]


@dataclass
class _Known:
    """The newest advice on a run."""

    about: object = None
    due: float = float("-inf")
    thread: Thread | None = None
    found: Sequence[Advice] = field(default_factory=lambda: none("it is being computed"))


_known: dict[Path, _Known] = {}


def advise(
    run: RunReader, wait: bool = True, clock: Callable[[], float] = time.monotonic
) -> Sequence[Advice]:
    """Return the advice on a run as it is now, or one sentence without overrides.

    Without `wait`, the result may be of an earlier moment.
    """
    known = _known.setdefault(run.path, _Known())
    about = len(run.accounts), len(run.rows), run.state, tuple(run.notes)
    rests = known.thread is None or not known.thread.is_alive()
    if about != known.about and rests and (run.state != "running" or clock() >= known.due):
        known.about = about
        known.thread = Thread(target=_compute, args=(known, run.path, clock), daemon=True)
        known.thread.start()
    if wait and known.thread is not None:
        known.thread.join()
    return known.found


def _compute(known: _Known, path: Path, clock: Callable[[], float]) -> None:
    begin = clock()
    try:
        known.found = plugins.load("advice", "plan", "advice")(RunReader(path).read())
    except ConfigError as error:
        known.found = none(str(error))
    except Exception as error:  # noqa: BLE001 - a view goes on without advice
        known.found = none(f"{type(error).__name__}: {error}")
    known.due = clock() + max(REST_S, REST * (clock() - begin))
