"""An asyncio event loop whose clock jumps to the next deadline instead of waiting for it.

A deadlock is a deterministic failure: if every task waits and there is no deadline, `run` raises
Deadlock. A timer of a day or more does not count as a deadline. Otherwise, the long deadlines of
waits would turn a deadlock into a jump.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

T = TypeVar("T")

HORIZON_S = 86_400.0
"""Later timers are no deadlines."""
_RESOLUTION_S = 1e-9
"""Timers that are closer together are due in the same turn."""
_MANY = 100
"""With more timers, cancelled timers are removed once most timers are cancelled."""


class Deadlock(RuntimeError):
    """Every task waits, and nothing will wake one."""


class _Call:
    """A callback that the loop calls, as asyncio.Handle without the traces for debugging."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context")
    _source_traceback = None

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context | None
    ) -> None:
        self._callback: Any = callback
        self._args = args
        self._context = copy_context() if context is None else context
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled, self._callback, self._args = True, None, ()

    def cancelled(self) -> bool:
        return self._cancelled


class _Timer(_Call):
    """A callback that the loop calls at a time."""

    __slots__ = ("_loop", "_scheduled", "_when")

    def __init__(self, when: float, loop: VirtualLoop, *call: Any) -> None:
        super().__init__(*call)
        self._when, self._loop, self._scheduled = when, loop, True

    def when(self) -> float:
        return self._when

    def __lt__(self, other: _Timer) -> bool:
        return self._when < other._when

    def cancel(self) -> None:
        if not self._cancelled:
            self._loop.cancelled += self._scheduled
            super().cancel()


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop of a simulation. `time()` returns virtual seconds since its start.

    Its methods do what those of asyncio do, but without sockets and debugging, in half of the time.
    """

    _ready: deque[_Call]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, _Timer]] = []
        self.cancelled = 0
        """Timers in `_timers` that are cancelled."""

    def time(self) -> float:
        return self._now

    def create_task(  # type: ignore[override]
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> _Call:
        call = _Call(callback, args, context)
        self._ready.append(call)
        return call

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> _Timer:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> _Timer:
        timer = _Timer(when, self, callback, args, context)
        heappush(self._timers, (when, timer))
        return timer

    def _run_once(self) -> None:
        """Call everything that is ready. If nothing is, first jump to the next timer."""
        if self.cancelled:
            self._remove_cancelled()
        timers, ready = self._timers, self._ready
        if not ready and not self._stopping:
            self._jump()
        end = self._now + _RESOLUTION_S
        while timers and timers[0][0] < end:
            timer = heappop(timers)[1]
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            call = ready.popleft()
            if call._cancelled:
                continue
            try:
                call._context.run(call._callback, *call._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - as asyncio.Handle
                text = f"Exception in callback {call._callback}"
                self.call_exception_handler({"message": text, "exception": error})

    def _jump(self) -> None:
        wait = max(0.0, self._timers[0][0] - self._now) if self._timers else HORIZON_S
        if wait >= HORIZON_S:
            raise Deadlock(f"at {self._now:.3f} s every task waits, and no deadline is near")
        self._now += wait

    def _remove_cancelled(self) -> None:
        """Remove cancelled timers that come first, or all if they are most of many."""
        timers = self._timers
        if len(timers) > _MANY and self.cancelled > len(timers) / 2:
            timers[:] = [one for one in timers if not one[1]._cancelled]
            heapify(timers)
            self.cancelled = 0
        while timers and timers[0][1]._cancelled:
            heappop(timers)[1]._scheduled = False
            self.cancelled -= 1


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on the virtual clock, like `asyncio.run`.

    asyncio's own handler of Ctrl-C is left out: to set it, `signal` formats the result of `main`.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.get_loop().run_until_complete(main)
