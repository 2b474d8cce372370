"""Decode steps that take longer with more requests, on the virtual clock."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field


@dataclass(order=True, slots=True)
class _Goal:
    """A request that ends its draw at a number of steps."""

    steps: float
    order: int
    woken: asyncio.Future[bool] = field(compare=False)


class DecodeSpeed:
    """The steps of one engine: each takes `step_s` plus `request_s` for each drawing request.

    All drawing requests take part in each step. A change of their number changes the speed of the
    steps from then on.
    """

    def __init__(self, step_s: float, request_s: float, queue: float = 0.0) -> None:
        self._step_s = step_s
        self._request_s = request_s
        self._queue = queue
        self._waits = False
        self._drawing = 0
        self._steps = 0.0
        self._since = 0.0
        self._goals: list[_Goal] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Return the number of steps up to now. A part of a step is a fraction."""
        elapsed = max(0.0, asyncio.get_running_loop().time() - self._since)
        return self._steps + elapsed / self._seconds()

    def stall(self, until: float) -> None:
        """Let no step go on before the time `until`. It replaces an earlier stall."""
        self._move()
        self._since = max(asyncio.get_running_loop().time(), until)
        self._arm()

    def wait(self, waits: bool) -> None:
        """Take note of whether requests wait for a slot, in which steps take longer."""
        if self._queue and waits != self._waits:
            self._move()
            self._waits = waits
            self._arm()

    def begin(self, steps: int, woken: asyncio.Future[bool]) -> None:
        """Add a request that draws `steps` tokens. Its end resolves `woken` with False."""
        self._move()
        self._drawing += 1
        heapq.heappush(self._goals, _Goal(self._steps + steps, next(self._order), woken))
        self._arm()

    def end(self) -> None:
        """Remove a request whose future is done or cancelled."""
        self._move()
        self._drawing -= 1
        self._arm()

    def _seconds(self) -> float:
        seconds = self._step_s + self._request_s * max(1, self._drawing)
        return seconds / (1 - self._queue) if self._waits else seconds

    def _move(self) -> None:
        """Count the steps up to now, at the speed of the requests up to now."""
        now = asyncio.get_running_loop().time()
        self._steps, self._since = self.now(), max(self._since, now)

    def _arm(self) -> None:
        """Wake up when the next request reaches its goal."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._goals and self._goals[0].woken.done():
            heapq.heappop(self._goals)
        if self._goals:
            left = max(0.0, self._goals[0].steps - self._steps)
            at = self._since + left * self._seconds()
            self._timer = asyncio.get_running_loop().call_at(at, self._reach)

    def _reach(self) -> None:
        self._move()
        while self._goals and self._goals[0].steps <= self._steps + 1e-6:
            goal = heapq.heappop(self._goals)
            if not goal.woken.done():
                goal.woken.set_result(False)
        self._arm()
