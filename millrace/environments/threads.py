"""Functions of users: what they may raise, and plain ones in threads that block nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from millrace.errors import EpisodeError

Result = TypeVar("Result")

RAISED = (Exception, SystemExit, KeyboardInterrupt)
"""What a user's function may raise. None of it ends the run: signals do not raise here."""

MOST_LOST = 64
"""Calls that still run, and that nobody waits for any more. With so many, no call starts."""

_lost: set[threading.Thread] = set()


def own_cancellation() -> bool:
    """Return whether somebody cancels this task. If not, a user's function raised CancelledError.

    Call it where CancelledError is caught.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def in_thread(function: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
    """Call a function in a daemon thread, and return its result or raise its error.

    Unlike `asyncio.to_thread`, a call that never returns keeps no other call and no exit waiting.
    Nobody can stop such a thread. Raises EpisodeError if too many are left.
    """
    _lost.difference_update([thread for thread in _lost if not thread.is_alive()])
    if len(_lost) >= MOST_LOST:
        name = getattr(function, "__name__", repr(function))
        raise EpisodeError(
            "tool_stuck",
            f"{name}: {len(_lost)} calls are past their deadline and still run. "
            "Fix: give the function a deadline of its own, or raise agents.tool_deadline_s",
        )
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    call = partial(contextvars.copy_context().run, function, *arguments, **named)

    def work() -> None:
        result, raised = None, None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - a thread may not end without an answer
            raised = error
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits.
            loop.call_soon_threadsafe(_settle, ended, (result, raised))

    thread = threading.Thread(target=work, name="a user's function", daemon=True)
    thread.start()
    try:
        result, error = await ended
    except asyncio.CancelledError:
        _lost.add(thread)
        raise
    # A coroutine may raise neither StopIteration nor GeneratorExit.
    if isinstance(error, RAISED) and not isinstance(error, StopIteration):
        raise error
    if error is not None:
        raise RuntimeError(type(error).__name__) from error
    return result  # type: ignore[no-any-return]


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
