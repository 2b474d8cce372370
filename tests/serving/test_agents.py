"""Episodes of several turns on a serving engine: sessions and their prefix cache across swaps.

Interruptions, swaps and cancellations come at any moment of an episode.
"""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from millrace.ports import PolicySession
from millrace.replicas.pool import RolloutPool
from millrace.rollout.episode import run_episode
from millrace.rollout.session import Limits
from millrace.serving.engine import ServingEngine
from millrace.types import (
    Author,
    Ending,
    Prompt,
    SamplingParams,
    Score,
    Segment,
    Tokens,
    Trajectory,
    tokens_of,
)
from tests.serving.replica import PROMPT, Replica

pytestmark = pytest.mark.xdist_group("engines")
EPISODES, TURNS, LENGTH = 32, 4, 30


class Caller:
    """An agent that reads the result of a tool after each turn but the last one.

    The tool of every other episode takes until the next version is live.
    """

    def __init__(self, engine: ServingEngine, number: int) -> None:
        self._engine, self._waits = engine, number % 2 == 0

    async def play(self, session: PolicySession) -> Ending:
        turn = await session.draw(session.prompt.tokens)
        for number in range(1, TURNS):
            version = self._engine.version
            while self._waits and self._engine.version == version:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.001)
            turn = await session.draw(tokens_of([5, 6, 7 + number]), after=turn.number)
        return Ending("done", Score(1.0))

    async def close(self) -> None:
        return None


@pytest.mark.parametrize(("kv", "first"), [("keep", 9000), ("recompute", 9500)])
def test_each_token_of_an_episode_has_its_version_and_its_log_prob(
    replica: Replica, runner: asyncio.Runner, kv: str, first: int
) -> None:
    engine, rng = replica.engine, random.Random(kv)
    pool, drawn = RolloutPool([engine]), list[Segment]()

    async def draw(tokens: Tokens, params: SamplingParams, name: str) -> tuple[Segment, ...]:
        segments = await pool.generate(tokens, params, name)
        drawn.extend(segments)
        return segments

    def play(number: int) -> asyncio.Task[Trajectory]:
        prompt = Prompt(number, tokens_of(PROMPT[: 80 + number]), "", "test")
        params = SamplingParams(250, seed=number, ignore_eos=True)
        limits = Limits(max_tokens_per_turn=LENGTH)
        name, player = f"{first + number}/0", Caller(engine, number)
        return asyncio.create_task(run_episode(draw, player, prompt, params, name, limits=limits))

    async def main() -> tuple[list[asyncio.Task[Trajectory]], int, int, int]:
        await replica.publish(first, 1)
        engine._recompute = kv == "recompute"
        before, version = await engine.stats(), first
        tasks = [play(number) for number in range(EPISODES)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(rng.random() * 0.2)
            if rng.random() < 0.3:
                await engine.interrupt()
            elif rng.random() < 0.3 and sum(task.cancelled() for task in tasks) < EPISODES // 8:
                rng.choice(tasks).cancel()
            version += 1
            await replica.publish(version, 1 + (version - first) % 2)
        engine._recompute = False
        after = await engine.stats()
        tokens = after.tokens - before.tokens - (after.cancelled_tokens - before.cancelled_tokens)
        return tasks, version, tokens, after.reused_tokens - before.reused_tokens

    tasks, last, tokens, reused = runner.run(main())
    returned = sum(len(segment.tokens) for segment in drawn)
    assert tokens == returned  # none is lost, none is drawn twice
    finished = {n: task.result() for n, task in enumerate(tasks) if not task.cancelled()}
    assert len(finished) >= EPISODES * 3 // 4 and last >= first + TURNS - 1 and reused > 0
    exact = spanning = 0
    for number, trajectory in finished.items():
        (thread,) = trajectory.threads
        policy = [s for s in thread.segments if s.author is Author.POLICY]
        assert sum(len(s.tokens) for s in policy) == TURNS * LENGTH
        versions = [s.version for s in policy]
        assert versions == sorted(versions) and first <= versions[0] <= versions[-1] <= last
        spanning += versions[-1] > versions[0]
        whole = sum((s.tokens for s in thread.segments), tokens_of())
        prompt = PROMPT[: 80 + number]
        models = [replica.log_probs(seed, prompt, whole) for seed in (1, 2)]
        at = 0
        for segment in thread.segments:
            here = slice(at, at := at + len(segment.tokens))
            if segment.author is Author.POLICY and segment.kv_version in (None, segment.version):
                given = torch.tensor(segment.log_probs)
                right, wrong = (models[(segment.version - first + k) % 2][here] for k in (0, 1))
                assert (given - right).abs().max() < 1e-4, (number, segment.version)
                exact += len(given) > 5 and bool((given - wrong).abs().max() > 0.1)
            else:
                assert segment.author is Author.ENVIRONMENT or kv == "keep"
    # Few segments of a run that keeps K and V have them of one version alone.
    most = len(finished) if kv == "recompute" else 0
    assert exact > most and spanning > len(finished) // 4
