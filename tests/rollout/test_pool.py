"""The pool of replicas: it routes requests, and it pauses all replicas together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from millrace.ports import RolloutEngine, RolloutStats
from millrace.replicas.pool import RolloutPool
from millrace.rollout.session import Session
from millrace.types import Prompt, SamplingParams, Segment, Tokens, tokens_of
from tests.rollout.helpers import said


@dataclass
class Engine:
    """A replica whose requests end when the test says so."""

    running: list[asyncio.Future[tuple[Segment, ...]]] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        self.sessions.append(session)
        self.running.append(asyncio.get_running_loop().create_future())
        return await self.running[-1]

    async def interrupt(self) -> None:
        self.log.append("interrupt")

    async def sleep(self, keep_weights: bool = True) -> None:
        self.log.append("sleep" if keep_weights else "sleep without weights")

    async def wake_weights(self) -> None:
        self.log.append("wake weights")

    async def wake(self) -> None:
        self.log.append("wake")

    async def close(self) -> None:
        self.log.append("close")

    async def stats(self) -> RolloutStats:
        return RolloutStats(1, 2, 3.0, 4, 5, 6)


async def test_requests_go_to_the_least_loaded_replica_and_sessions_stay_at_home() -> None:
    engines = [Engine(), Engine()]
    pool = RolloutPool(engines)
    tasks = [
        asyncio.create_task(pool.generate(tokens_of([1]), SamplingParams(1), f"s{i}"))
        for i in range(4)
    ]
    await asyncio.sleep(0)
    assert [e.sessions for e in engines] == [["s0", "s2"], ["s1", "s3"]]
    for future in engines[1].running:
        future.set_result((said([1]),))
    await asyncio.sleep(0)
    again = asyncio.create_task(pool.generate(tokens_of([1]), SamplingParams(1), "s0"))
    await asyncio.sleep(0)
    assert engines[0].sessions[-1] == "s0", "replica 1 is idle, but the KV cache of s0 is here"
    for task in [*tasks, again]:
        task.cancel()
    await asyncio.wait([*tasks, again])
    assert not any(pool._loads.values()), "cancelled requests are no load"
    for i in range(4):
        pool.forget(f"s{i}")
    assert not pool._homes


async def test_siblings_share_a_replica_until_it_has_much_more_to_do() -> None:
    engines = [Engine(), Engine(), Engine()]
    pool = RolloutPool(engines)
    names = [f"{sample}/{i}" for sample in (0, 1) for i in range(4)] + [f"2/{i}" for i in range(13)]
    tasks = [
        asyncio.create_task(pool.generate(tokens_of([1]), SamplingParams(1), name))
        for name in names
    ]
    await asyncio.sleep(0)
    assert [len(e.sessions) for e in engines] == [5, 4, 12]
    assert {s[0] for s in engines[1].sessions} == {"1"} and {s[0] for s in engines[2].sessions} == {
        "2"
    }
    assert engines[0].sessions[-1] == "2/12", (
        "a home with eight requests more than the least loaded one is full"
    )
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for sample in range(3):
        pool.forget(str(sample))
    assert not pool._homes


async def test_all_threads_and_turns_of_an_episode_stay_on_its_replica_and_are_forgotten_with_it() -> (
    None
):
    """A session passes its own name for every thread, also for those that draw at once."""

    async def draw(pool: RolloutPool, engines: list[Engine]) -> None:
        async def answered(
            tokens: Tokens, params: SamplingParams, name: str
        ) -> tuple[Segment, ...]:
            call = asyncio.create_task(pool.generate(tokens, params, name))
            await asyncio.sleep(0)
            for engine in engines:
                for future in engine.running:
                    if not future.done():
                        future.set_result((said([1]),))
            return await call

        session = Session(answered, Prompt(17, tokens_of([5]), "p", "d"), SamplingParams(9), "17/3")
        first = await session.draw(tokens_of([5]))
        for _ in range(3):
            await asyncio.gather(
                session.draw(tokens_of([6]), after=first.number), session.draw(tokens_of([7, 8]))
            )

    engines = [Engine(), Engine()]
    pool = RolloutPool(engines)
    busy = asyncio.create_task(pool.generate(tokens_of([1]), SamplingParams(1), "9/0"))
    await asyncio.sleep(0)
    engines[0].running.clear()
    await draw(pool, engines)
    assert [e.sessions for e in engines] == [["9/0"], ["17/3"] * 7]
    pool.forget("17")
    assert set(pool._homes) == {"9"}
    busy.cancel()
    await asyncio.wait([busy])


async def test_a_pool_is_held_still_as_one_and_counts_as_one() -> None:
    engines: list[Engine] = [Engine(), Engine(), Engine()]
    pool: RolloutEngine = RolloutPool(engines)
    await pool.sleep(False)  # type: ignore[attr-defined]
    for action in (pool.interrupt, pool.sleep, pool.wake_weights, pool.wake, pool.close):  # type: ignore[attr-defined]
        await action()
    assert all(
        e.log == ["sleep without weights", "interrupt", "sleep", "wake weights", "wake", "close"]
        for e in engines
    )
    assert await pool.stats() == RolloutStats(3, 6, 9.0, 12, 15, 18)
