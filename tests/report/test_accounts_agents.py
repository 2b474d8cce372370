"""Agents in the whole pipeline: the ledger balances, and each drawn token is in one bucket."""

from __future__ import annotations

import asyncio

import pytest

from millrace.errors import EpisodeError
from millrace.ports import PolicySession
from millrace.simulate.cost import CostModel
from millrace.types import Author, Ending, Score, tokens_of
from tests.pipeline.simulated import RUNS, schedule_of
from tests.report.accounts_cases import Accounts, run

COST = CostModel(reward_s=0.3, log_prob_token_s=0.0001)


class Tools:
    """Two parallel sub-agents and a turn that nobody receives; every seventh prompt fails."""

    async def play(self, session: PolicySession) -> Ending:
        length = session.prompt.tokens[0] % 40 + 1
        root = await session.draw(session.prompt.tokens, max_tokens=length)
        await asyncio.sleep(0.5)  # a tool
        if session.prompt.index % 7 == 3:
            raise EpisodeError("tool", "died")
        await asyncio.gather(
            session.draw(tokens_of([5, 5]), after=root.number, max_tokens=9),
            session.draw(tokens_of([6]), after=root.number, max_tokens=5),
        )
        lost = await session.draw(tokens_of([8]), after=root.number, max_tokens=3)
        session.kill(lost.number)
        return Ending(score=Score(float(session.prompt.index % 2)))

    async def close(self) -> None: ...


@pytest.mark.parametrize("mode", RUNS)
def test_every_token_of_agents_is_trained_dead_or_dropped(mode: str) -> None:
    accounts = Accounts(replicas=2)
    outcome = run(schedule_of(mode), 24, accounts, cost=COST, agent=Tools())
    totals = accounts.tokens.totals()
    trained = [t for _, s in outcome.trained for t in s.trajectories]
    assert totals["trained"] == sum(t.num_policy_tokens for t in trained)
    assert totals["dead"] == sum(t.dead_tokens for t in trained) == 3 * len(trained)
    assert totals["dropped/tool"] > 0 and outcome.ledger.dropped["tool"] > 0
    assert set(totals) == {"trained", "dead", "dropped/tool"}
    assert sum(totals.values()) == accounts.tokens.generated
    assert all(len(t.threads) == 2 and t.counts["dead_turns"] == 1 for t in trained)
    drawn_once = [len([s for s in t.segments if s.author is Author.POLICY]) for t in trained]
    assert min(drawn_once) >= 3
    outcome.ledger.check()


@pytest.mark.parametrize("mode", ["async_partial", "async_staleness", "colocate_partial"])
def test_the_accounts_of_agents_add_up_over_a_stop_and_a_resume(mode: str) -> None:
    schedule, first = schedule_of(mode), Accounts()
    stopped = run(schedule, 40, first, cost=COST, agent=Tools(), stop_at=4.0)
    snapshot = stopped.record.saved or stopped.ledger.snapshot()
    first.tokens.end(snapshot)
    totals = first.tokens.totals()
    assert sum(totals.values()) == first.tokens.generated
    second = Accounts(counts=first.tokens.counts(snapshot), before=first.tokens.generated)
    run(schedule, 40, second, cost=COST, agent=Tools(), start=snapshot)
    totals = second.tokens.totals()
    assert sum(totals.values()) == second.tokens.generated and "held" not in totals
