"""Waits for a replica: what renews them, and that each of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from millrace.errors import DeadlineError
from millrace.process.rpc import Peer
from millrace.replicas.roster import Roster
from millrace.replicas.trainer_group import TrainerGroup
from millrace.simulate.clock import VirtualLoop

DEADLINE_S = 60.0


def virtually(work: Callable[[], Coroutine[Any, Any, float]]) -> float:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work())


async def waits(roster: Roster) -> float:
    """Return the time at which a wait for a replica that never serves ends."""
    with pytest.raises(DeadlineError, match="a request waited 60 s for a replica"):
        await roster.wait("a request", lambda: bool(roster.live), DEADLINE_S)
    assert not roster._waits and not roster._renewed and not roster._listeners
    roster.extend_waits()  # Nobody waits any more.
    return asyncio.get_running_loop().time()


def lost() -> Roster:
    roster = Roster(1, max_restarts=9)
    roster.lose(0, 0, "why")
    return roster


def test_a_wait_that_nobody_renews_ends_soon_after_its_deadline() -> None:
    async def main() -> float:
        return await waits(lost())

    assert DEADLINE_S < virtually(main) < 1.1 * DEADLINE_S


def test_a_wait_counts_from_the_last_change_or_call() -> None:
    """Each call to a rank renews it, and so do changes of replicas."""

    async def main() -> float:
        roster, peer = lost(), Peer("trainer-0", lambda frame: None, deadline_s=1.0)
        TrainerGroup([peer], None, max_restarts=3, moved=roster.extend_waits)  # type: ignore[arg-type]
        wait = asyncio.create_task(waits(roster))
        await asyncio.sleep(50.0)
        roster.start_failed(0, "why")
        await asyncio.sleep(50.0)
        with pytest.raises(DeadlineError, match="trainer-0 did not answer"):
            await peer.call("engine.step")
        return await wait

    assert 100.0 + DEADLINE_S < virtually(main) < 100.0 + 1.1 * DEADLINE_S


def test_a_call_that_begins_with_a_wait_misses_its_deadline_first() -> None:
    async def main() -> float:
        roster, peer = lost(), Peer("trainer-0", lambda frame: None, deadline_s=DEADLINE_S)
        wait = asyncio.create_task(waits(roster))
        await asyncio.sleep(0.9)
        with pytest.raises(DeadlineError, match="trainer-0 did not answer"):
            await peer.call("engine.step")
        assert not wait.done()
        return await wait

    virtually(main)
