"""An asyncio event loop whose clock jumps to the next deadline instead of waiting for it.

A deadlock is a deterministic failure: if every task waits and there is no deadline, `run` raises
Deadlock. A timer of a day or more does not count as a deadline. Otherwise, the long deadlines of
waits would turn a deadlock into a jump.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from millrace.waits.registry import Registry, within

T = TypeVar("T")

HORIZON_S = 86_400.0
"""The longest wait that asyncio requests from a selector. Later timers request the same wait."""


class Deadlock(RuntimeError):
    """Every task waits, and nothing will wake one."""


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout >= HORIZON_S:
            raise Deadlock(f"at {self.now:.3f} s every task waits, and no deadline is near")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop of a simulation. `time()` returns virtual seconds since its start."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on the virtual clock, like `asyncio.run`.

    It sets no handler of Ctrl-C. To set one, `signal` makes a text of the old handler, and with it of
    the whole result of `main`.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        with within(Registry("driver", loop.time).root):
            return loop.run_until_complete(main)
