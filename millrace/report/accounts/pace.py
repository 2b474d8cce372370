"""The account of load: how long each engine drew with how many requests.

It shows whether more requests make the decode step longer: versions have different loads, so their
tokens show it. While all slots are busy, other requests wait, and a new one begins in most steps. Some
engines need much longer for a step that also reads a prompt, so that time has a bin of its own.
"""

from __future__ import annotations

import math

from millrace.waits.stream import Event

WIDTH = math.log(1.1)
"""Loads that differ by a tenth are in different bins."""

WAIT = "full"
"""The bin of the time in which requests wait for a slot."""


class _Engine:
    """The requests of one engine, and its decode slots, since a time."""

    __slots__ = ("level", "since", "slots")

    def __init__(self, now: float) -> None:
        self.level, self.slots, self.since = 0, 0, now


class LoadAccount:
    """A watcher of requests. At most as many requests draw as the engine has decode slots."""

    names = frozenset({"stats", "request"})

    def __init__(self) -> None:
        self._full = [0.0, 0.0]
        self.bins: dict[str, list[float]] = {WAIT: self._full}
        self._engines: dict[str, _Engine] = {}
        self._bins: dict[int, list[float]] = {}
        """The bin of each load that occurred. A logarithm for each event takes too long."""

    def __call__(self, event: Event) -> None:
        now = event.time
        engine = self._engines.get(event.track)
        if engine is None:
            engine = self._engines[event.track] = _Engine(now)
        waits = engine.level > engine.slots
        load = engine.slots if waits else engine.level
        seconds, engine.since = now - engine.since, now
        if load > 0 and seconds > 0:
            if (bin_ := self._full if waits else self._bins.get(load)) is None:
                name = str(int(math.log(load) / WIDTH))
                bin_ = self._bins[load] = self.bins.setdefault(name, [0.0, 0.0])
            bin_[0] += seconds
            bin_[1] += seconds * load
        if event.name == "request":
            engine.level += 1 if event.phase == "begin" else -1
        else:
            engine.slots = event.facts["stats"].slots
