"""Episodes of real clients at a real endpoint, over the engine that draws what hurts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from millrace.agents.endpoint import Endpoint
from millrace.agents.service import Service
from millrace.types import Trajectory
from tests.agents.adversary import Engine, differences, episode_of, finish
from tests.agents.clients import Program
from tests.agents.talks import options
from tests.waiting import HANG_S


@dataclass(slots=True)
class Tally:
    """What became of the episodes of one client."""

    episodes: int = 0
    turns: int = 0
    tokens: int = 0
    dead_tokens: int = 0
    threads: Counter[int] = field(default_factory=Counter)
    forks: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)
    """The errors that programs raised. A client may refuse an answer that a limit cut."""
    failed: list[BaseException] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


@asynccontextmanager
async def endpoint() -> AsyncIterator[Endpoint]:
    """Serve at a free port."""
    found = Endpoint(Service(options()), "127.0.0.1", 0)
    await found.start()
    try:
        yield found
    finally:
        await found.close()


async def play(
    served: Endpoint, program: Program, stream: bool, engine: Engine, name: str, seed: int
) -> tuple[Trajectory, list[str], str, BaseException | None]:
    """Play one episode. Return it, its differences, the program's error, and the endpoint's."""
    session, talk = episode_of(engine, name, seed)
    live = served.service.open(talk, session)
    raised = "deadline"
    with suppress(TimeoutError):
        async with asyncio.timeout(HANG_S):
            (result,) = await asyncio.gather(
                program(served.url, live.key, stream), return_exceptions=True
            )
            raised = "" if result is None else type(result).__name__
    await served.service.end(live)
    trajectory = finish(session, talk)
    return trajectory, differences(trajectory, engine, session), raised, live.error


async def tally(
    served: Endpoint, program: Program, stream: bool, episodes: int, seed: int = 0
) -> Tally:
    """Play episodes with seeds of their own, one after the other."""
    engine, found = Engine(), Tally()
    for k in range(episodes):
        name = f"{program.__name__}/{stream}/{k}"
        one, wrong, raised, failed = await play(served, program, stream, engine, name, seed + k)
        engine.log.pop(name, None)
        found.episodes += 1
        found.turns += int(one.counts["turns"] + one.counts["dead_turns"])
        found.tokens += one.num_policy_tokens
        found.dead_tokens += one.dead_tokens
        found.threads[len(one.threads)] += 1
        found.differences += wrong
        if raised:
            found.raised[raised] += 1
        if failed is not None:
            found.failed.append(failed)
        for key, value in one.counts.items():
            if key.startswith("forks/"):
                found.forks[key] += int(value)
    return found
