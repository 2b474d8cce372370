"""The account of load: how long each engine drew with how many requests.

It shows whether more requests make the decode step longer. The engine draws b tokens in a step with
b requests, which takes f + e b seconds. Versions have different loads, so their tokens show f and e.

While all slots are busy, other requests wait, and a new one begins in most steps. Some engines need
much longer for a step that also reads a prompt. So the share q of that time may be lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.waits.stream import Event

Array = NDArray[Any]

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
            points.append((bins, total, tokens / total))
    if len(points) < LEAST_VERSIONS:
        return None
    names = sorted({name for bins, _, _ in points for name in bins})
    seconds, loads_s = (
        np.array([[bins.get(name, (0.0, 0.0))[i] for name in names] for bins, _, _ in points])
        for i in (0, 1)
    )
    load = np.divide(loads_s, seconds, out=np.ones_like(seconds), where=seconds > 0)
    part, top = seconds / np.array([[total] for _, total, _ in points]), load[seconds > 0].max()
    tokens_s = np.array([tokens for _, _, tokens in points])
    # With each share of growth: the tokens of steps that take a second at the load `top`.
    grows = np.linspace(0, 1, 51)
    shares = grows[:, None, None]
    drawn = part * load / (1 - shares + shares * load / top)
    every = drawn.sum(axis=2)
    r, y = tokens_s / every, drawn[:, :, [n == WAIT for n in names]].sum(axis=2) / every
    plain, waits = _fit(r, np.zeros_like(y)), _fit(r, y)
    known = KNOWN**2 * len(points)
    likely = 1 + 4 / (len(points) - 2)
    clearly = plain[0].min() + known > likely * (waits[0].min() + known)
    errors, a, b = waits if clearly else plain
    best = int(errors.argmin())
    if not clearly and errors.max() <= LEAST_CONTRAST * errors[best] + 1e-9:
        return None
    flattest = int(np.argmax(errors <= likely * errors[best]))
    found = np.stack([(1 - grows) / a, grows / a / top, b / a], axis=1)
    return StepCost(*found[best].tolist()), StepCost(*found[flattest].tolist())


def _fit(r: Array, y: Array) -> tuple[Array, Array, Array]:
    """Return the squared errors, a and b of the least squares r = a - b y over the versions.

    r are the tokens, of those that steps of one second at the load `top` would draw. y is the part of
    those steps in which requests wait. Then a step takes 1 / a seconds, and q is b / a.
    """
    mean, spread = r.mean(axis=1), y.var(axis=1)
    covariance = ((y - y.mean(axis=1, keepdims=True)) * (r - mean[:, None])).mean(axis=1)
    b = np.where(spread > ALIKE**2, -covariance / np.maximum(spread, ALIKE**2), 0.0)
    a = mean + b * y.mean(axis=1)
    right = (b > 0) & (b < a)
    a, b = np.where(right, a, mean), np.where(right, b, 0.0)
    return ((r / (a[:, None] - b[:, None] * y) - 1) ** 2).sum(axis=1), a, b
