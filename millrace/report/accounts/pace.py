"""The account of load: how long each engine drew with how many requests.

It shows whether more requests make the decode step longer. The engine draws b tokens in a step with
b requests. If the step takes f + e b seconds, the tokens of a version are the integral of
b / (f + e b) over its time. Versions have different loads, so their tokens show f and e.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from millrace.observe.watch import Event

WIDTH = math.log(1.1)
"""Loads that differ by a tenth are in different bins."""

LEAST_VERSIONS = 4
"""Versions that show how a step grows."""

LEAST_CONTRAST = 1.5
"""How much worse the worst growth must explain the tokens of the versions than the best one."""

StepLine = tuple[float, float]
"""f and e: the seconds of a decode step, and those for each request in it."""

Loads = Mapping[str, Sequence[float]]
"""For each bin of loads: seconds of engines, and the integral of the load over them."""


class _Engine:
    """The requests of one engine, and its decode slots, since a time."""

    __slots__ = ("level", "since", "slots")

    def __init__(self, now: float) -> None:
        self.level, self.slots, self.since = 0, 0, now


class LoadAccount:
    """A watcher of requests. At most as many requests draw as the engine has decode slots."""

    names = frozenset({"stats", "request"})

    def __init__(self) -> None:
        self.bins: dict[str, list[float]] = {}
        self._engines: dict[str, _Engine] = {}
        self._bins: dict[int, list[float]] = {}
        """The bin of each load that occurred. A logarithm for each event takes too long."""

    def __call__(self, event: Event) -> None:
        now = event.time
        engine = self._engines.get(event.track)
        if engine is None:
            engine = self._engines[event.track] = _Engine(now)
        load = engine.level if engine.level < engine.slots else engine.slots
        seconds, engine.since = now - engine.since, now
        if load > 0 and seconds > 0:
            bin_ = self._bins.get(load) or self._bin(load)
            bin_[0] += seconds
            bin_[1] += seconds * load
        if event.name == "request":
            engine.level += 1 if event.phase == "begin" else -1
        else:
            engine.slots = event.facts["stats"].slots

    def _bin(self, load: int) -> list[float]:
        name = str(int(math.log(load) / WIDTH))
        found = self._bins[load] = self.bins.setdefault(name, [0.0, 0.0])
        return found


def step_lines(versions: Sequence[tuple[Loads, float]]) -> tuple[StepLine, StepLine] | None:
    """Return the line that explains the tokens best, and the flattest one that is likely.

    Each version has its loads and the tokens that it drew. The share of the step that grows is
    searched, and the speed follows from the least squares. A share is likely if its squared error
    is within two standard deviations of the least one: with v versions and two unknowns, at most
    1 + 4 / (v - 2) times as large. None if any share explains the tokens nearly as well.
    """
    points = [
        ([(load / seconds, seconds) for seconds, load in loads.values() if seconds > 0], tokens)
        for loads, tokens in versions
        if tokens > 0
    ]
    points = [(times, tokens) for times, tokens in points if times]
    if len(points) < LEAST_VERSIONS:
        return None
    top = max(load for times, _ in points for load, _ in times)
    tries = [(*_error(points, share / 50, top), share / 50) for share in range(51)]
    best = min(tries)
    if max(tries)[0] < LEAST_CONTRAST * best[0]:
        return None
    likely = (1 + 4 / (len(points) - 2)) * best[0]
    flattest = next(one for one in tries if one[0] <= likely)
    first, second = (
        (scale * (1 - share), scale * share / top) for _, scale, share in (best, flattest)
    )
    return first, second


def _error(
    points: Sequence[tuple[Sequence[tuple[float, float]], float]], share: float, top: float
) -> tuple[float, float]:
    """Return the relative squared error, and the seconds of a step at the load `top`."""
    drawn = [
        sum(seconds * load / (1 - share + share * load / top) for load, seconds in times) / tokens
        for times, tokens in points
    ]
    scale = sum(d * d for d in drawn) / sum(drawn)
    return sum((d / scale - 1) ** 2 for d in drawn), scale
