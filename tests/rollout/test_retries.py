"""An episode that fails begins again. Its sample is dropped after the last try."""

from __future__ import annotations

import asyncio

import pytest

from millrace.errors import EpisodeError
from millrace.ports import PolicySession
from millrace.rollout.episode import run_episode
from millrace.simulate.cost import CostModel
from millrace.types import (
    Ending,
    Prompt,
    SamplingParams,
    Score,
    Segment,
    Tokens,
    Trajectory,
    tokens_of,
)
from tests.agents.adversary import Engine
from tests.pipeline.simulated import RUNS, schedule_of
from tests.report.accounts_cases import Accounts, run

COST = CostModel(reward_s=0.3, log_prob_token_s=0.0001)


class Flaky:
    """Some episodes fail in its first `failures` tries, after two turns and a dead one."""

    def __init__(self, failures: int, every: int = 3) -> None:
        self.failures = failures
        self.every = every
        self.tries: dict[str, int] = {}

    async def play(self, session: PolicySession) -> Ending:
        tried = self.tries[session.name] = self.tries.get(session.name, 0) + 1
        root = await session.draw(session.prompt.tokens, max_tokens=7)
        await asyncio.sleep(0.2)
        lost = await session.draw(tokens_of([5]), after=root.number, max_tokens=3)
        session.kill(lost.number)
        await session.draw(tokens_of([6]), after=root.number, max_tokens=4)
        if session.prompt.index % self.every == 0 and tried <= self.failures:
            raise EpisodeError("tool", "died")
        return Ending(score=Score(float(session.prompt.index % 2)))

    async def close(self) -> None: ...


@pytest.mark.parametrize("mode", RUNS)
def test_the_tokens_of_failed_tries_are_dead(mode: str) -> None:
    accounts = Accounts(replicas=2)
    outcome = run(schedule_of(mode), 24, accounts, cost=COST, agent=Flaky(2), retries=2)
    trained = [(s.prompt.index, t) for _, s in outcome.trained for t in s.trajectories]
    for index, one in trained:
        failed = 2 if index % 3 == 0 else 0
        assert one.counts.get("retries", 0) == failed
        assert one.dead_tokens == 3 + failed * (one.num_policy_tokens + 3)
    totals = accounts.tokens.totals()
    assert set(totals) == {"trained", "dead"}, totals
    assert totals["dead"] == sum(t.dead_tokens for _, t in trained)
    assert sum(totals.values()) == accounts.tokens.generated
    assert not outcome.ledger.dropped
    outcome.ledger.check()


def test_the_sample_is_dropped_after_the_last_try() -> None:
    accounts, agent = Accounts(), Flaky(2, every=8)
    outcome = run(schedule_of("async_partial"), 24, accounts, cost=COST, agent=agent, retries=1)
    totals = accounts.tokens.totals()
    assert outcome.ledger.dropped["tool"] >= 3 and totals["dropped/tool"] > 0
    assert max(agent.tries.values()) == 2
    assert all(s.prompt.index % 8 for _, s in outcome.trained)
    assert sum(totals.values()) == accounts.tokens.generated
    outcome.ledger.check()


def test_a_turn_that_a_failure_cuts_is_dead_and_the_next_try_starts_anew() -> None:
    engine, seen = Engine(calls=0), list[Trajectory]()

    class Cut:
        tries = 0

        async def play(self, session: PolicySession) -> Ending:
            assert not session.turns
            self.tries += 1
            await session.draw(session.prompt.tokens)
            if self.tries < 3:
                raise EpisodeError("agent_exit", "killed")
            return Ending()

        async def close(self) -> None: ...

    async def draw(tokens: Tokens, params: SamplingParams, name: str) -> tuple[Segment, ...]:
        return await engine.draw(tokens, params, f"{name}/{agent.tries}")

    agent = Cut()
    prompt = Prompt(0, tokens_of([7, 8]), "x", "test")
    done = asyncio.run(
        run_episode(
            draw,
            agent,
            prompt,
            SamplingParams(64, seed=3),
            "0/0",
            retries=2,
            on_progress=seen.append,
        )
    )
    drawn = [sum(len(t.tokens) for t in log.values()) for log in engine.log.values()]
    assert len(drawn) == 3 and len(set(drawn)) == 1  # equal seeds
    assert done.num_policy_tokens == drawn[2] and done.dead_tokens == drawn[0] + drawn[1]
    assert done.counts["retries"] == 2
    dead = [t.dead_tokens for t in seen]
    assert dead == sorted(dead)
