"""The deadline of an answer of a tool or an environment. Waiting for a free place is not in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

_timer: ContextVar[asyncio.Timeout | None] = ContextVar("deadline", default=None)


@asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[None]:
    """Bound a block, as asyncio.timeout does."""
    async with asyncio.timeout(seconds) as timer:
        token = _timer.set(timer)
        try:
            yield
        finally:
            _timer.reset(token)


@contextmanager
def stopped() -> Iterator[None]:
    """Stop the clock of the deadline around this block: something shared makes it wait."""
    timer, now = _timer.get(), asyncio.get_running_loop().time
    if timer is None or timer.expired() or (end := timer.when()) is None:
        yield
        return
    left = end - now()
    timer.reschedule(None)
    try:
        yield
    finally:
        timer.reschedule(now() + left)
