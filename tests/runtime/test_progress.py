"""Deadlines of requests limit the time without progress.

The Peer and the Host are real, and the clock is virtual.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from millrace.errors import ReplicaLost
from millrace.ports import RolloutStats
from millrace.process.rpc import Peer
from millrace.replicas.replica import RemoteRolloutEngine
from millrace.runtime.host import Host
from millrace.simulate import clock
from millrace.types import SamplingParams, Segment, Tokens, tokens_of

DEADLINE_S = 1800.0
STALL_S = 10.0


@dataclass
class Engine:
    """Serves one request at a time: `tokens` tokens, one every `token_s` seconds."""

    token_s: float
    tokens: int
    drawn: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        async with self.turn:
            for _ in range(self.tokens):
                await asyncio.sleep(self.token_s)
                self.drawn += 1
        return ()

    async def stats(self) -> RolloutStats:
        return RolloutStats(tokens=self.drawn)

    async def wake(self) -> None:
        await asyncio.sleep(1000.0)

    async def activate(self) -> None:
        async with self.turn:
            await asyncio.sleep(60.0)


@dataclass
class BlockedEngine(Engine):
    """An engine whose process answers nothing while a version becomes live."""

    async def stats(self) -> RolloutStats:
        async with self.turn:
            return await super().stats()


@dataclass
class Root:
    engine: Engine

    @property
    def receiver(self) -> Engine:
        return self.engine


@asynccontextmanager
async def replica(engine: Engine) -> AsyncIterator[RemoteRolloutEngine]:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        peer = Peer(
            "rollout-0",
            lambda frame: loop.call_soon(host.receive, frame),  # type: ignore[arg-type, return-value]
            deadline_s=DEADLINE_S,
        )
        host = Host(Root(engine), lambda frame: loop.call_soon(peer.receive, frame), tasks)  # type: ignore[arg-type, return-value]
        yield RemoteRolloutEngine(peer, stall_s=STALL_S)


async def draw(engine: Engine, requests: int) -> float:
    """Return the seconds until all requests are served."""
    start = asyncio.get_running_loop().time()
    async with replica(engine) as remote:
        calls = [
            remote.generate(tokens_of([1]), SamplingParams(9), str(k)) for k in range(requests)
        ]
        await asyncio.gather(*calls)
    return asyncio.get_running_loop().time() - start


def test_a_request_that_queues_behind_others_does_not_reach_its_deadline() -> None:
    """Each request takes ten minutes, one after the other."""
    seconds = clock.run(draw(Engine(token_s=6.0, tokens=100), requests=12))
    assert seconds == pytest.approx(12 * 600.0) and seconds > 3 * DEADLINE_S


def test_one_long_response_does_not_reach_its_deadline_while_tokens_are_drawn() -> None:
    assert clock.run(draw(Engine(token_s=6.0, tokens=1200), requests=1)) > 3 * DEADLINE_S


def test_a_replica_that_stands_still_is_lost_and_a_slow_start_is_none() -> None:
    """Before its first token a worker may compile for three minutes. Later, ten seconds are all."""

    async def lost_after(engine: Engine, drawn: int) -> float:
        engine.drawn = drawn
        with pytest.raises(ExceptionGroup) as caught:
            await draw(engine, requests=3)
        (error,) = caught.value.exceptions
        assert isinstance(error, ReplicaLost)
        assert "rollout-0 stood still" in str(error) and "with 3 requests" in str(error)
        return asyncio.get_running_loop().time()

    stuck = Engine(token_s=80_000.0, tokens=2)
    assert 10 <= clock.run(lost_after(stuck, drawn=5)) < 13
    assert 180 <= clock.run(lost_after(Engine(token_s=80_000.0, tokens=2), drawn=0)) < 185


@dataclass
class SlowingEngine(Engine):
    """Its first tokens take 8 s each, the eleventh `last_s`."""

    last_s: float = 0.0

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        for k in range(11):
            await asyncio.sleep(8.0 if k < 10 else self.last_s)
            self.drawn += 1
        return ()


def test_the_limit_grows_with_the_steps_of_a_slow_replica() -> None:
    """Steps of 8 s allow one of 30 s, and not one of an hour."""
    assert clock.run(draw(SlowingEngine(1.0, 1, last_s=30.0), requests=1)) == pytest.approx(110.0)

    async def lost_at() -> float:
        with pytest.raises(ExceptionGroup) as caught:
            await draw(SlowingEngine(1.0, 1, last_s=3600.0), requests=1)
        assert "rollout.stall_s" in str(caught.value.exceptions[0])
        return asyncio.get_running_loop().time()

    assert 110 < clock.run(lost_at()) < 130


@pytest.mark.virtual_clock
async def test_a_replica_that_changes_its_weights_or_sleeps_does_not_stand_still() -> None:
    async with replica(Engine(token_s=400.0, tokens=1, drawn=3)) as remote:
        busy = asyncio.create_task(remote.wake())
        await remote.generate(tokens_of([1]), SamplingParams(9), "s")
        busy.cancel()
    assert asyncio.get_running_loop().time() >= 400


@pytest.mark.virtual_clock
async def test_a_replica_without_requests_is_not_asked_about_its_progress() -> None:
    async with replica(Engine(token_s=1.0, tokens=1)) as remote:
        await remote.generate(tokens_of([1]), SamplingParams(9), "s")
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1


def test_totals_may_wait_for_a_version_that_becomes_live() -> None:
    """The trainer asks for both at once. A replica with a large model is then not lost."""

    async def activate() -> RolloutStats:
        async with replica(BlockedEngine(1.0, 1, drawn=3)) as remote:
            await remote.stats()
            activation = asyncio.ensure_future(remote.peer.call("receiver.activate"))
            await asyncio.sleep(0)
            totals = await remote.stats()
            await activation
        return totals

    assert clock.run(activate()) == RolloutStats(tokens=3)
