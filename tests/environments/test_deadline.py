"""The deadline of an answer, on the virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from millrace.environments.deadline import deadline, stopped
from millrace.simulate.clock import run


async def _use(room: asyncio.Semaphore, seconds: float) -> None:
    async with deadline(10):
        await asyncio.sleep(1)
        with stopped():
            await room.acquire()
        try:
            await asyncio.sleep(seconds)
        finally:
            room.release()


def test_the_wait_for_a_free_place_is_not_in_the_deadline() -> None:
    async def main() -> None:
        room = asyncio.Semaphore(1)
        await asyncio.gather(*(_use(room, 8) for _ in range(20)))
        with pytest.raises(TimeoutError):
            await _use(room, 9.5)
        with stopped():  # no deadline is a deadline of nobody
            await room.acquire()

    run(main())
