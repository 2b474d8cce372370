"""Work in a thread while its owner continues."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

from millrace.waits.registry import acting, waiting

P = ParamSpec("P")
T = TypeVar("T")


async def abandonable(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a new thread, and return its value.

    Cancellation ends the wait at once, and the work continues. With `asyncio.to_thread`, the event
    loop and the process would wait for it at their end. Here they do not.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(method: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            method(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = future.set_result, work(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - the boundary: the caller raises it
            outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
            loop.call_soon_threadsafe(settle, *outcome)

    name, target = getattr(work, "__name__", "work"), copy_context().run
    threading.Thread(target=target, args=(run,), name=name, daemon=True).start()
    return await future


class Background:
    """A thread for one task at a time. Await `wait` before the next `start`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(1, name)
        self._work: Future[None] | None = None

    def start(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Start the work at once, even if the event loop is busy."""
        actor = acting(self._name)

        def run() -> None:
            with actor:
                work(*args, **kwargs)

        self._work = self._thread.submit(run)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the value of the work. Cancellation of the wait does not end the work."""
        context = copy_context()  # The waits of the thread are those of its caller.
        future = self._thread.submit(lambda: context.run(work, *args, **kwargs))
        return await asyncio.shield(asyncio.wrap_future(future))

    def forget(self) -> None:
        """Forget the work that was started, with its error."""
        self._work = None

    async def wait(self) -> None:
        """Wait for the end of the work, and raise its error once.

        Cancellation of the wait does not end the work.
        """
        if self._work is not None:
            work = asyncio.wrap_future(self._work)
            with waiting(self._name, "its end"):
                await asyncio.wait([work])
            self._work = None
            work.result()
