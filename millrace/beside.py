"""Work in a thread, beside what its owner does next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec

P = ParamSpec("P")


class Beside:
    """One thing at a time: await `done` before the next `start`."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._work: Future[None] | None = None

    def start(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """It begins at once, whether or not an event loop has a turn."""
        self._work = self._thread.submit(work, *args, **kwargs)

    async def done(self) -> None:
        """Until it is. Raises what it failed with, once. Who gives up waiting does not end it."""
        if self._work is not None:
            work = asyncio.wrap_future(self._work)
            await asyncio.wait([work])
            self._work = None
            work.result()
