"""The spans and the events of a process: who does what, who waits, for whom, since when.

An actor is a task that others may wait for: the trainer, a sample, a session, a call that a worker
serves. The current actor is a context variable, so tasks and threads inherit it. Open waits are what
`millrace why` reads. Spans and states are events of the stream, which metrics, accounts and the trace
read. Nothing here waits, and nothing imports torch. A registered wait costs less than a microsecond
(docs/failures.md).

| call | meaning |
|---|---|
| `with acting("sample 17")` | the body is this actor; its parent waits for it |
| `with waiting("rollout-1", "engine.generate")` | the body waits for someone |
| `with doing("backward of micro-batch 3")` | the body works; with `by`, someone outside works for it |
| `with span("sync", "transfer", "7", part="sync_transfer")` | the body is a span of a track |
| `with part("wait_publish", "sync", "the version")` | the actor is in this state; an inner one suspends it |
| `at("run", "published", version=7)` | something happens |
| `with starting("imports")` | the body is a part of this process's start; its times are kept |
| `count("buckets")`, `gauge("tokens", f)` | something moves: slow is not stuck |

A part takes a cause too: it `waits_for` somebody. A span takes the work `what`, `by` somebody outside.

Watchers read the events; they decide nothing. Each track is one place where things happen:
`trainer`, each replica (`rollout-0`), `rollouts` (all replicas), `rewards`, `teachers`, `sync`,
`validation`, `checkpoint`, `samples` and `run`.

| phase | meaning |
|---|---|
| begin, end | a span. The two have the same track, name and key. Spans of a track may overlap |
| state | the track is in the state `name` from now on |
| at | something happened at this moment |
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

T = TypeVar("T")
Phase = Literal["begin", "end", "state", "at"]
Clock = Callable[[], float]

OTHER = "other"
"""The state of an actor in no part."""


class Event(NamedTuple):
    """One event of a run."""

    time: float
    """Seconds of the registry's clock."""
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


class Registry:
    """The open waits and actors of one process, its counters, and its stream of events."""

    def __init__(self, name: str, clock: Clock = time.monotonic, *watchers: Watcher) -> None:
        self.name, self.clock = name, clock
        self._watchers = watchers
        self._readers: dict[str, tuple[Watcher, ...]] = {}
        """The watchers of each name that occurred."""
        self.states: dict[str, str] = {}
        """The state of each actor that has had one."""
        self.open: set[Wait] = set()
        self.actors: set[Actor] = set()
        self.counts: dict[str, int] = {}
        self.gauges: dict[str, Callable[[], float]] = {}
        self.facts: dict[str, Callable[[], str]] = {}
        self.starts: list[Start] = []
        """The ended parts of the process's start, until somebody takes them."""
        self.root = Actor("", None, self)
        """What runs under no name."""

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

    def switch(self, actor: str, state: str) -> str:
        """Put an actor into a state. Return the state before."""
        before = self.states.get(actor, OTHER)
        if state != before:
            self.states[actor] = state
            self.emit(actor, state, "state", "", {})
        return before

    def progress(self) -> dict[str, float]:
        """Return every counter and gauge."""
        values: dict[str, float] = dict(self.counts)
        for name, read in list(self.gauges.items()):
            with suppress(LookupError, RuntimeError):  # it changed while another thread read it
                values[name] = read()
        return values


class Start(NamedTuple):
    """A part of a process's start. Its times are those of `time.time`, equal on all processes."""

    what: str
    begin: float
    end: float


class Actor:
    """A named task. As a context manager, it is the current actor of its body."""

    __slots__ = ("_before", "name", "parent", "registry", "since")

    def __init__(self, name: str, parent: Actor | None, registry: Registry) -> None:
        self.name, self.parent, self.registry, self.since = name, parent, registry, 0.0

    def __enter__(self) -> Actor:
        self.since = self.registry.clock()
        self._before = _current.get()
        _current.set(self)
        self.registry.actors.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.registry.actors.discard(self)
        _current.set(self._before)


class Wait:
    """One open wait, or one open piece of work."""

    __slots__ = ("actor", "meeting", "number", "since", "what", "whom", "work")

    def __init__(
        self, whom: str, what: str, meeting: str = "", number: int = 0, work: bool = False
    ) -> None:
        self.whom, self.what, self.work = whom, what, work
        self.meeting, self.number = meeting, number

    def __enter__(self) -> Wait:
        actor = self.actor = _current.get()
        registry = actor.registry
        self.since = registry.clock()
        registry.open.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.actor.registry.open.discard(self)


class Span:
    """A span of a track. It is a class because a generator takes twice as long."""

    __slots__ = ("_key", "_name", "_registry", "_track", "facts")

    def __init__(
        self, registry: Registry, track: str, name: str, key: str, facts: dict[str, Any]
    ) -> None:
        self._registry, self._track, self._name, self._key = registry, track, name, key
        self.facts = facts
        """Those of the begin, and in the body those of the end."""

    def __enter__(self) -> Span:
        begin, self.facts = self.facts, {}
        self._registry.emit(self._track, self._name, "begin", self._key, begin)
        return self

    def __exit__(self, *error: object) -> None:
        self._registry.emit(self._track, self._name, "end", self._key, self.facts)


class Part(Wait):
    """A state of the current actor, a cause, or both, perhaps with a span."""

    __slots__ = ("_before", "_span", "facts", "name", "seconds")

    def __init__(self, name: str, whom: str, what: str, work: bool, span: Span | None) -> None:
        self.whom, self.what, self.work, self.meeting, self.number = whom, what, work, "", 0
        self.name, self._span = name, span

    def __enter__(self) -> Part:
        actor = self.actor = _current.get()
        registry = actor.registry
        self.since = registry.clock()
        if self.what:
            registry.open.add(self)
        if self.name:
            self._before = registry.switch(actor.name, self.name)
        if self._span is not None:
            self.facts = self._span.__enter__().facts
        return self

    def __exit__(self, *error: object) -> None:
        registry = self.actor.registry
        if self._span is not None:
            self._span.__exit__()
        if self.name:
            self.seconds = registry.clock() - self.since
            registry.switch(self.actor.name, self._before)
        registry.open.discard(self)


class Starting(Wait):
    """Open work that is a part of a start."""

    __slots__ = ("begin",)

    def __enter__(self) -> Wait:
        self.begin = time.time()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.actor.registry.starts.append(Start(self.what, self.begin, time.time()))


PROCESS = Registry("driver")
"""The registry of this process."""

_current: ContextVar[Actor] = ContextVar("actor", default=PROCESS.root)


def current() -> Actor:
    """Return the current actor."""
    return _current.get()


def acting(name: str) -> Actor:
    """Name the body of a `with` block. The current actor becomes its parent."""
    parent = _current.get()
    return Actor(name, parent, parent.registry)


def waiting(whom: str, what: str, meeting: str = "", number: int = 0) -> Wait:
    """Register that the body of a `with` block waits for `whom` to do `what`.

    `whom` is an actor, a process, or someone outside, such as "tool search". "a|b" means b where
    there is no a. A name may end in "*", for all that begin so. In a `meeting` each member waits
    for those that have not come to it with this `number` or a higher one.
    """
    return Wait(whom, what, meeting, number)


def doing(what: str, by: str = "") -> Wait:
    """Register that the body of a `with` block works on `what`.

    `by` names who works for it outside of what millrace knows, such as "the disk".
    """
    return Wait(by, what, "", 0, True)


def span(track: str, name: str, key: str = "", /, *, part: str = "", what: str = "", by: str = "",
         **facts: Any) -> Span | Part:  # fmt: skip
    """Make a `with` block a span of a track, and the state `part` of the current actor.

    With `what`, it is also open work, which `by` does.
    """
    made = Span(_current.get().registry, track, name, key, facts)
    return Part(part, by, what, True, made) if part or what else made


def part(name: str, waits_for: str = "", what: str = "") -> Part:
    """Put the current actor into the state `name` for a `with` block. An inner one suspends it.

    With `what`, it is also an open wait for `waits_for`, or without anybody open work.
    """
    return Part(name, waits_for, what, not waits_for, None)


def at(track: str, name: str, key: str = "", /, **facts: Any) -> None:
    """Report that something happens now."""
    _current.get().registry.emit(track, name, "at", key, facts)


def starting(what: str) -> Starting:
    """Register that the body of a `with` block does a part of this process's start."""
    return Starting("", what, "", 0, True)


def began(what: str) -> None:
    """Register the time since this process began as a part of its start."""
    import psutil

    PROCESS.starts.append(Start(what, psutil.Process().create_time(), time.time()))


def take_starts() -> list[Start]:
    """Return the ended parts of this process's start. The next call returns later ones."""
    starts, PROCESS.starts = PROCESS.starts, []
    return starts


def count(name: str, number: int = 1) -> None:
    """Count a step of progress."""
    counts = _current.get().registry.counts
    counts[name] = counts.get(name, 0) + number


def gauge(name: str, read: Callable[[], float]) -> None:
    """Register a counter that is read only when somebody looks."""
    _current.get().registry.gauges[name] = read


def fact(name: str, read: Callable[[], str]) -> None:
    """Register a line for reports, such as the state of the ledger."""
    _current.get().registry.facts[name] = read


async def as_actor(name: str, work: Awaitable[T]) -> T:
    """Await `work` as the actor `name`."""
    with acting(name):
        return await work


@contextmanager
def measuring(name: str, read: Callable[[], float]) -> Iterator[None]:
    """Register a counter for a block, such as the CPU time of a start."""
    gauges = _current.get().registry.gauges
    gauges[name] = read
    try:
        yield
    finally:
        gauges.pop(name, None)


class within:  # noqa: N801 - a verb of this module, like the others
    """Make an actor the current one for a block, without beginning or ending it."""

    __slots__ = ("_actor", "_before")

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    def __enter__(self) -> None:
        self._before = _current.get()
        _current.set(self._actor)

    def __exit__(self, *error: object) -> None:
        _current.set(self._before)
