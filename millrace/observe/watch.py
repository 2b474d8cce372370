"""What happens in a run, as a stream of events. Watchers read it; they decide nothing.

Each track is one place where things happen: `trainer`, each replica (`rollout-0`), `rollouts` (all
replicas), `rewards`, `sync`, `validation`, `checkpoint`, `samples` and `run`.

| phase | meaning |
|---|---|
| begin, end | a span. The two have the same track, name and key. Spans of a track may overlap |
| state | the track is in the state `name` from now on |
| at | something happened at this moment |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["begin", "end", "state", "at"]


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a run."""

    time: float
    """Seconds of the event loop's clock."""
    track: str
    name: str
    phase: Phase
    key: str = ""
    """What it is about: a session ("17/3"), a sample or a version."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Figures, texts, and for some events the objects of the run. Watchers change nothing."""


Watcher = Callable[[Event], None]
"""Reads an event. It never waits and never raises."""


class Watch:
    """Stamps events and hands them to every watcher, in order."""

    def __init__(
        self, clock: Callable[[], float] = lambda: 0.0, watchers: Sequence[Watcher] = ()
    ) -> None:
        self._clock = clock
        self._watchers = tuple(watchers)

    def at(self, track: str, name: str, key: str = "", /, **facts: Any) -> None:
        """Report that something happens now."""
        self._emit(track, name, "at", key, facts)

    def state(self, track: str, name: str) -> None:
        """Report that `track` is in the state `name` from now on."""
        self._emit(track, name, "state", "", {})

    @contextmanager
    def span(
        self, track: str, name: str, key: str = "", /, **facts: Any
    ) -> Iterator[dict[str, Any]]:
        """Report the begin and the end of the body. The body may add facts for the end."""
        last: dict[str, Any] = {}
        self._emit(track, name, "begin", key, facts)
        try:
            yield last
        finally:
            self._emit(track, name, "end", key, last)

    def _emit(self, track: str, name: str, phase: Phase, key: str, facts: dict[str, Any]) -> None:
        if self._watchers:
            event = Event(self._clock(), track, name, phase, key, facts)
            for watcher in self._watchers:
                watcher(event)


UNWATCHED = Watch()
"""Nobody watches."""
