"""The account of load: how long each engine drew with how many requests.

It shows whether more requests make the decode step longer. The engine draws b tokens in a step with
b requests, which takes f + e b seconds. Versions have different loads, so their tokens show f and e.

While all slots are busy, other requests wait, and a new one begins in most steps. Some engines need
much longer for a step that also reads a prompt. So the share q of that time may be lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, pvariance
from typing import NamedTuple

from millrace.waits.stream import Event

WIDTH = math.log(1.1)
"""Loads that differ by a tenth are in different bins."""

LEAST_VERSIONS = 4
"""Versions that show how a step grows."""

LEAST_CONTRAST = 1.5
"""How much worse the worst growth must explain the tokens of the versions than the best one."""

ALIKE = 0.01
"""If the share of the time in which requests wait spreads no more over the versions, q is unknown."""

LEAST_TOKENS = 1e-3
"""Tokens a second. With fewer, an engine drew nothing."""

KNOWN = 0.02
"""Relative error of a version's tokens that needs no cause."""

WAIT = "full"
"""The bin of the time in which requests wait for a slot."""


class StepCost(NamedTuple):
    """The parts of an engine's time."""

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


class _Version(NamedTuple):
    """The engines' rates in one version, for each of their seconds."""

    loads: Sequence[tuple[float, float, bool]]
    """Loads, the share of the time with each, and whether requests wait then."""
    tokens: float


class _Fit(NamedTuple):
    """The least-squares fit of one growth. Fits are in the order of their errors."""

    error: float
    share: float
    """The share of the step that grows, at the largest load."""
    seconds: float
    """The seconds of a step at that load."""
    queue: float

    def cost(self, top: float) -> StepCost:
        fixed = self.seconds * (1 - self.share)
        return StepCost(fixed, self.seconds * self.share / top, self.queue)


def step_costs(versions: Sequence[tuple[Loads, float]]) -> tuple[StepCost, StepCost] | None:
    """Return the cost that explains the tokens best, and the flattest one that is likely.

    Each version has its loads and the tokens that it drew. The share of the step that grows is
    searched, and the rest follows from the least squares. A fit is likely if its squared error is
    within two standard deviations of the least one: with v versions and two unknowns, at most
    1 + 4 / (v - 2) times as large. q is 0 if that is likely. None if any share explains the tokens
    nearly as well as the best.
    """
    points = []
    for loads, tokens in versions:
        bins = {name: bin_ for name, bin_ in loads.items() if min(bin_) > 0}
        total = sum(seconds for seconds, _ in bins.values())
        if bins and tokens > total * LEAST_TOKENS:
            shares = [(load / s, s / total, name == WAIT) for name, (s, load) in bins.items()]
            points.append(_Version(shares, tokens / total))
    if len(points) < LEAST_VERSIONS:
        return None
    top = max(load for one in points for load, _, _ in one.loads)
    plain, waits = ([_fit(points, k / 50, top, queue=q) for k in range(51)] for q in (False, True))
    known = KNOWN**2 * len(points)
    likely = 1 + 4 / (len(points) - 2)
    clearly = min(plain).error + known > likely * (min(waits).error + known)
    tries = waits if clearly else plain
    best = min(tries)
    if not clearly and max(tries).error <= LEAST_CONTRAST * best.error + 1e-9:
        return None
    flattest = next(one for one in tries if one.error <= likely * best.error)
    return best.cost(top), flattest.cost(top)


def _fit(points: Sequence[_Version], share: float, top: float, *, queue: bool) -> _Fit:
    """Return the least squares of one equation for each version: r = a - b y.

    r are the tokens, of those that steps of one second at the load `top` would draw. y is the part of
    those steps in which requests wait. Then a step takes 1 / a seconds, and q is b / a.
    """
    r, y = [], []
    for one in points:
        drawn = [
            (part * load / (1 - share + share * load / top), waits)
            for load, part, waits in one.loads
        ]
        total = sum(tokens for tokens, _ in drawn)
        r.append(one.tokens / total)
        y.append(sum(tokens for tokens, waits in drawn if waits) / total)
    mean_r, mean_y = fmean(r), fmean(y)
    a, b = mean_r, 0.0
    spread = pvariance(y, mean_y)
    if queue and spread > ALIKE**2:
        b = -fmean((v - mean_y) * (w - mean_r) for v, w in zip(y, r, strict=True)) / spread
        a = mean_r + b * mean_y
        if not 0 < b < a:
            a, b = mean_r, 0.0
    error = sum((w / (a - b * v) - 1) ** 2 for v, w in zip(y, r, strict=True))
    return _Fit(error, share, 1 / a, b / a)
