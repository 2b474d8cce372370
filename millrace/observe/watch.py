"""The event stream of a run. Watchers read it; they decide nothing.

Each track is one place where things happen: `trainer`, each replica (`rollout-0`), `rollouts` (all
replicas), `rewards`, `sync`, `validation`, `checkpoint`, `samples` and `run`.

| phase | meaning |
|---|---|
| begin, end | a span. The two have the same track, name and key. Spans of a track may overlap |
| state | the track is in the state `name` from now on |
| at | something happened at this moment |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Phase = Literal["begin", "end", "state", "at"]


class Event(NamedTuple):
    """One event of a run."""

    time: float
    """Seconds of the event loop's clock."""
    track: str
    name: str
    phase: Phase
    key: str = ""
    """What it is about: a session ("17/3"), a sample or a version."""
    facts: Mapping[str, Any] = MappingProxyType({})
    """Figures, texts, and for some events the objects of the run. Watchers change nothing."""


Watcher = Callable[[Event], None]
"""Reads an event. It never waits and never raises.

It may have an attribute `names`: it then gets the events of these names alone.
"""


class Watch:
    """Stamps events and hands them to every watcher, in order."""

    def __init__(
        self, clock: Callable[[], float] = lambda: 0.0, watchers: Sequence[Watcher] = ()
    ) -> None:
        self._clock = clock
        self._watchers = tuple(watchers)
        self._readers: dict[str, tuple[Watcher, ...]] = {}
        """The watchers of each name that occurred."""

    def at(self, track: str, name: str, key: str = "", /, **facts: Any) -> None:
        """Report that something happens now."""
        self.emit(track, name, "at", key, facts)

    def state(self, track: str, name: str) -> None:
        """Report that `track` is in the state `name` from now on."""
        self.emit(track, name, "state", "", {})

    def span(self, track: str, name: str, key: str = "", /, **facts: Any) -> Span:
        """Report the begin and the end of a `with` block, which gets a dict of facts for the end."""
        return Span(self, track, name, key, facts)

    def emit(self, track: str, name: str, phase: Phase, key: str, facts: dict[str, Any]) -> None:
        """Hand one event to every watcher."""
        if self._watchers:
            event = Event(self._clock(), track, name, phase, key, facts)
            readers = self._readers.get(name)
            if readers is None:
                readers = self._readers[name] = tuple(
                    w for w in self._watchers if name in getattr(w, "names", (name,))
                )
            for watcher in readers:
                watcher(event)


class Span:
    """A span of a watch. It is a class because a generator takes twice as long."""

    __slots__ = ("_facts", "_key", "_name", "_track", "_watch")

    def __init__(
        self, watch: Watch, track: str, name: str, key: str, facts: dict[str, Any]
    ) -> None:
        self._watch, self._track, self._name, self._key = watch, track, name, key
        self._facts = facts

    def __enter__(self) -> dict[str, Any]:
        begin, self._facts = self._facts, {}
        self._watch.emit(self._track, self._name, "begin", self._key, begin)
        return self._facts

    def __exit__(self, *error: object) -> None:
        self._watch.emit(self._track, self._name, "end", self._key, self._facts)


UNWATCHED = Watch()
"""Nobody watches."""
