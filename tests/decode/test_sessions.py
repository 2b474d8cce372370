"""Episodes of several turns on the torch engine: a sync at any token changes versions alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.errors import EpisodeError
from millrace.rollout.session import Limits, Session
from millrace.types import Author, Ending, Prompt, SamplingParams, Trajectory, tokens_of
from tests.decode.helpers import engine, prompt, turns

PROMPT = Prompt(0, prompt(3, 6), "p", "d")
TOOL = tokens_of([5, 6, 7])


async def three_turns(session: Session) -> Trajectory:
    first = await session.draw(PROMPT.tokens)
    second = await session.draw(TOOL, after=first.number)
    await asyncio.sleep(0)  # a tool
    await session.draw(TOOL, after=second.number)
    return session.trajectory(Ending())


def episode(sync: str, at: int) -> tuple[Trajectory, set[int]]:
    """Play an episode with one sync of equal weights after `at` turns of the event loop.

    Return it with the numbers of drawn tokens after which its segments were cut.
    """

    async def run() -> Trajectory:
        eng: Any = engine(deterministic=True, slots=2)
        gate = asyncio.Event()
        gate.set()

        async def draw(*request: Any) -> Any:  # as the Rollouter does
            await gate.wait()
            return await eng.generate(*request)

        params = SamplingParams(60, seed=9, ignore_eos=True)
        session = Session(draw, PROMPT, params, "0/0", Limits(max_tokens_per_turn=7))
        task = asyncio.create_task(three_turns(session))
        await turns(at)
        if sync == "interrupt":
            gate.clear()
            await eng.interrupt()
        if sync in ("interrupt", "swap"):
            await eng.swap(1, {name: t.clone() for name, t in eng.weights().items()})
        gate.set()
        try:
            return await task
        finally:
            await eng.close()

    done = asyncio.run(run())
    drawn, cuts = 0, set[int]()
    for segment in done.segments:
        drawn += len(segment.tokens) if segment.author is Author.POLICY else 0
        cuts |= {drawn}
    return done, cuts


@pytest.mark.parametrize("sync", ["interrupt", "swap"])
def test_a_sync_after_every_token_of_three_turns_changes_nothing_but_versions(sync: str) -> None:
    calm, ends = episode("none", 0)
    assert ends == {7, 14, 21} and set(calm.versions) == {0}
    policy = [s for s in calm.segments if s.author is Author.POLICY]
    log_probs = [p for s in policy for p in s.log_probs]
    cut: set[int] = set()
    mixed = 0
    for at in range(100):
        done, cuts = episode(sync, at)
        assert done.tokens == calm.tokens
        found = [p for s in done.segments for p in s.log_probs]
        # An interruption computes the prefix anew in other shapes. Some CPUs round these otherwise.
        assert found == (log_probs if sync == "swap" else pytest.approx(log_probs, abs=1e-5))
        assert list(done.versions) == sorted(done.versions)
        mixed += set(done.versions) == {0, 1}
        cut |= cuts
        if set(done.versions) == {0}:
            break
    assert cut == set(range(1, 22)) and mixed >= 18


def test_the_context_of_each_turn_is_exactly_the_tokens_so_far() -> None:
    calm, _ = episode("none", 0)
    (thread,) = calm.threads
    assert [len(s.tokens) for s in thread.segments] == [7, 3, 7, 3, 7] and thread.opening is None
    assert thread.segments[1].tokens == TOOL
    with pytest.raises(EpisodeError):
        asyncio.run(_after_the_end())


async def _after_the_end() -> None:
    session = Session(engine().generate, PROMPT, SamplingParams(3), "0/0")
    session.trajectory(Ending())
    await session.draw(PROMPT.tokens)
