"""The event stream of a process. Watchers read it; they decide nothing.

Each track is one place where things happen: `trainer`, each replica (`rollout-0`), `rollouts` (all
replicas), `rewards`, `teachers`, `sync`, `validation`, `checkpoint`, `samples` and `run`.

| phase | meaning |
|---|---|
| begin, end | a span. The two have the same track, name and key. Spans of a track may overlap |
| state | the track is in the state `name` from now on |
| at | something happened at this moment |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Phase = Literal["begin", "end", "state", "at"]
Clock = Callable[[], float]


class Event(NamedTuple):
    """One event of a run."""

    time: float
    """Seconds of the stream's clock."""
    track: str
    name: str
    phase: Phase
    key: str = ""
    """What it is about: a session ("17/3"), a sample or a version."""
    facts: Mapping[str, Any] = MappingProxyType({})
    """Figures, texts, and for some events the objects of the run. Watchers change nothing."""


Watcher = Callable[[Event], None]
"""Reads an event. It never waits and never raises.

It may have an attribute `names`: it then gets the events of these names alone, and the states of
the tracks among them.
"""


class Stream:
    """Stamps events and hands them to every watcher, in order."""

    def __init__(self, clock: Clock = time.monotonic, *watchers: Watcher) -> None:
        self.clock = clock
        self._watchers = watchers
        self._readers: dict[str, tuple[Watcher, ...]] = {}
        """The watchers of each name that occurred."""

    @contextmanager
    def watched_by(self, *watchers: Watcher) -> Iterator[None]:
        """Hand the events of the body to `watchers`, too."""
        self._watchers, self._readers = (*self._watchers, *watchers), {}
        try:
            yield
        finally:
            self._watchers = tuple(w for w in self._watchers if w not in watchers)
            self._readers = {}

    def emit(self, track: str, name: str, phase: Phase, key: str, facts: Mapping[str, Any]) -> None:
        """Hand one event to its watchers."""
        of = track if phase == "state" else name
        readers = self._readers.get(of)
        if readers is None:
            readers = self._readers[of] = tuple(
                w for w in self._watchers if of in getattr(w, "names", (of,))
            )
        if readers:
            event = Event(self.clock(), track, name, phase, key, facts)
            for watcher in readers:
                watcher(event)

    def at(self, track: str, name: str, key: str = "", /, **facts: Any) -> None:
        """Report that something happens now."""
        self.emit(track, name, "at", key, facts)

    def state(self, track: str, name: str) -> None:
        """Report that `track` is in the state `name` from now on."""
        self.emit(track, name, "state", "", {})
