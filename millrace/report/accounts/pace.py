"""The account of load: how long each engine drew with how many requests.

It shows whether more requests make the decode step longer. The engine draws b tokens in a step with
b requests, which takes f + e b seconds. Versions have different loads, so their tokens show f and e.

While all slots are busy, other requests wait, and a new one begins in most steps. Some engines need
much longer for a step that also reads a prompt. So the share q of that time may be lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul
from typing import NamedTuple

from millrace.observe.watch import Event

WIDTH = math.log(1.1)
"""Loads that differ by a tenth are in different bins."""

LEAST_VERSIONS = 4
"""Versions that show how a step grows."""

LEAST_CONTRAST = 1.5
"""How much worse a growth, or a q of 0, must explain the tokens of the versions than the best."""

ALIKE = 1e-6
"""If the slots are full for so nearly the same share of each version, nothing shows q."""

KNOWN = 0.02
"""Relative error of a version's tokens that needs no cause."""

FULL = 0.97
"""Share of an engine's slots from which on all are busy: a bin has only the mean of its loads."""


class StepCost(NamedTuple):
    """What the time of an engine goes to."""

    fixed_s: float
    """f: seconds of a decode step."""
    each_s: float
    """e: further seconds for each request in the step."""
    queue: float = 0.0
    """q: share of the time that is lost while requests wait for a slot."""

    def step_s(self, requests: float) -> float:
        """Return the seconds of a step with so many requests, if none waits."""
        return self.fixed_s + self.each_s * requests


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


class _Version(NamedTuple):
    """What the engines did in one version, for each of their seconds."""

    loads: Sequence[tuple[float, float]]
    """Loads, and the share of the time with each."""
    tokens: float
    full: float
    """Share of the time with all slots busy."""


class _Fit(NamedTuple):
    """What the least squares give for one growth. Fits are in the order of their errors."""

    error: float
    share: float
    """The share of the step that grows, at the largest load."""
    seconds: float
    """The seconds of a step at that load."""
    queue: float

    def cost(self, top: float) -> StepCost:
        fixed = self.seconds * (1 - self.share)
        return StepCost(fixed, self.seconds * self.share / top, self.queue)


def step_costs(
    versions: Sequence[tuple[Loads, float]], slots: float
) -> tuple[StepCost, StepCost] | None:
    """Return the cost that explains the tokens best, and the flattest one that is likely.

    Each version has its loads and the tokens that it drew. `slots` are those of one engine. The share
    of the step that grows is searched, and the rest follows from the least squares. q is 0 unless it
    explains the tokens clearly better. A share is likely if its squared error is within two standard
    deviations of the least one: with v versions and two unknowns, at most 1 + 4 / (v - 2) times as
    large. None if any share explains the tokens nearly as well.
    """
    points = [point for one in versions if (point := _version(*one, slots)) is not None]
    if len(points) < LEAST_VERSIONS:
        return None
    top = max(load for one in points for load, _ in one.loads)
    plain, waits = ([_fit(points, k / 50, top, queue=q) for k in range(51)] for q in (False, True))
    known = KNOWN**2 * len(points)
    clearly = min(plain).error + known >= LEAST_CONTRAST * (min(waits).error + known)
    tries = waits if clearly else plain
    best = min(tries)
    if not clearly and max(tries).error <= LEAST_CONTRAST * best.error + 1e-9:
        return None
    likely = (1 + 4 / (len(points) - 2)) * best.error
    flattest = next(one for one in tries if one.error <= likely)
    return best.cost(top), flattest.cost(top)


def _version(loads: Loads, tokens: float, slots: float) -> _Version | None:
    bins = [(load / seconds, seconds) for seconds, load in loads.values() if seconds > 0]
    total = sum(seconds for _, seconds in bins)
    if not bins or tokens <= 0:
        return None
    full = sum(seconds for load, seconds in bins if load >= FULL * slots)
    return _Version([(load, part / total) for load, part in bins], tokens / total, full / total)


def _fit(points: Sequence[_Version], share: float, top: float, *, queue: bool) -> _Fit:
    """Return the least squares of one equation for each version: seconds x + q y = 1.

    The step that a version shows without q is 1 / x, and y is its share of the time with full slots.
    """
    x = [
        one.tokens / sum(part * load / (1 - share + share * load / top) for load, part in one.loads)
        for one in points
    ]
    y = [one.full if queue else 0.0 for one in points]
    xx, xy, yy = (sum(map(mul, *pair)) for pair in ((x, x), (x, y), (y, y)))
    seconds, q = sum(x) / xx, 0.0
    apart = xx * yy - xy * xy
    if apart > ALIKE * xx * yy:
        two = (sum(x) * yy - sum(y) * xy) / apart, (sum(y) * xx - sum(x) * xy) / apart
        if two[0] > 0 and 0 < two[1] < 1:
            seconds, q = two
    error = sum((seconds * a + q * b - 1) ** 2 for a, b in zip(x, y, strict=True))
    return _Fit(error, share, seconds, q)
