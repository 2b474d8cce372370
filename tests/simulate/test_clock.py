"""The virtual clock: time jumps, and every deadlock fails at once."""

from __future__ import annotations

import asyncio

import pytest

from millrace.simulate import clock
from millrace.simulate.clock import Deadlock


@pytest.mark.virtual_clock
async def test_hours_pass_in_no_time_and_in_order() -> None:
    seen: list[tuple[float, str]] = []

    async def nap(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((asyncio.get_running_loop().time(), name))

    await asyncio.gather(nap("c", 7200), nap("a", 0.25), nap("b", 3600))
    assert seen == [(0.25, "a"), (3600.0, "b"), (7200.0, "c")]


def test_two_tasks_that_wait_for_each_other_are_a_deadlock_every_time() -> None:
    async def main() -> None:
        first, second = asyncio.Event(), asyncio.Event()

        async def cross(mine: asyncio.Event, theirs: asyncio.Event) -> None:
            await asyncio.sleep(1.5)
            await theirs.wait()
            mine.set()

        await asyncio.gather(cross(first, second), cross(second, first))

    for _ in range(5):
        with pytest.raises(
            Deadlock, match=r"at 1\.500 s every task waits, and no deadline is near"
        ):
            clock.run(main())


@pytest.mark.parametrize("deadline_s", [1e5, 1e7, 1e9])
def test_a_deadline_days_away_does_not_hide_a_deadlock(deadline_s: float) -> None:
    async def main() -> None:
        await asyncio.wait_for(asyncio.Event().wait(), deadline_s)

    with pytest.raises(Deadlock, match=r"at 0\.000 s"):
        clock.run(main())


def test_a_deadline_hours_away_is_reached() -> None:
    async def main() -> None:
        await asyncio.wait_for(asyncio.Event().wait(), 80_000)

    with pytest.raises(TimeoutError):
        clock.run(main())


@pytest.mark.virtual_clock
async def test_work_that_takes_no_virtual_time_takes_none() -> None:
    for _ in range(1000):
        await asyncio.sleep(0)
    assert asyncio.get_running_loop().time() == 0.0
