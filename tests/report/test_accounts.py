"""The accounts add up in every mode, also of agents, with drops, stops, kills and resumes."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import EpisodeError, LimitReached
from millrace.ports import PolicySession
from millrace.report.accounts import tokens_of_slot
from millrace.schedule.ledger import LedgerSnapshot
from millrace.types import Author, Ending, Score, Turn, tokens_of
from tests.pipeline.simulated import RUNS, mixed, schedule_of
from tests.report.accounts_cases import Accounts, check_a_stop_and_a_kill, run


@pytest.mark.parametrize("mode", RUNS)
@pytest.mark.parametrize("greedy", [False, True])
def test_every_token_of_a_whole_run_is_trained_or_a_baseline(mode: str, greedy: bool) -> None:
    accounts = Accounts(replicas=2)
    outcome = run(schedule_of(mode), 40, accounts, greedy=greedy)
    trained = sum(t.num_tokens for _, s in outcome.trained for t in s.trajectories)
    baseline = sum(s.greedy.num_tokens for _, s in outcome.trained if s.greedy)
    expected = {"trained": trained, "baseline": baseline}
    assert accounts.tokens.totals() == {name: n for name, n in expected.items() if n}


@pytest.mark.parametrize("mode", RUNS)
def test_dropped_tokens_are_counted_by_reason(mode: str) -> None:
    accounts = Accounts()
    outcome = run(schedule_of(mode), 40, accounts, chance=mixed)
    totals = accounts.tokens.totals()
    trained = sum(t.num_tokens for _, s in outcome.trained for t in s.trajectories)
    assert outcome.ledger.dropped["equal_outcomes"] > 0
    assert totals["trained"] == trained and totals["dropped/equal_outcomes"] > 0


@settings(max_examples=25, deadline=None)
@given(
    mode=st.sampled_from(RUNS),
    stop_at=st.floats(0.5, 60.0),
    cut=st.integers(0, 8),
    staleness=st.sampled_from([0.5, 1.0, 2.7]),
    drops=st.booleans(),
)
def test_the_accounts_add_up_over_a_stop_and_a_kill(
    mode: str, stop_at: float, cut: int, staleness: float, drops: bool
) -> None:
    schedule = schedule_of(mode, staleness=staleness)
    chance = mixed if drops else None
    check_a_stop_and_a_kill(schedule, 60, stop_at, lambda cuts: cut % cuts, chance=chance)


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
    outcome = run(schedule_of(mode), 24, accounts, agent=Tools())
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
    schedule, agent = schedule_of(mode), Tools()
    check_a_stop_and_a_kill(schedule, 40, 4.0, lambda cuts: 0, _held, agent=agent)


class Wild:
    """An agent by chance: cancelled draws, draws at once, dead turns, new threads, tools, errors."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    async def play(self, session: PolicySession) -> Ending:
        chance = random.Random(f"{self._seed}/{session.prompt.index}/{session.name}")
        try:
            await self._play(session, chance)
        except LimitReached as limit:
            return Ending(limit.limit, Score(0.0))
        return Ending(score=Score(float(chance.random() < 0.5)))

    async def _play(self, session: PolicySession, chance: random.Random) -> None:
        turn: Turn | None = None
        for k in range(chance.randint(1, 5)):
            context = session.prompt.tokens if turn is None else tokens_of([k + 1] * (k + 1))
            after, what = None if turn is None else turn.number, chance.random()
            if what < 0.15:
                cut = asyncio.ensure_future(session.draw(context, after=after, max_tokens=40))
                await asyncio.sleep(chance.choice([0, 0.01, 0.2, 1.0]))
                cut.cancel()
                await asyncio.gather(cut, return_exceptions=True)
            elif what < 0.3:
                await asyncio.gather(
                    *(session.draw(tokens_of([j]), max_tokens=9 * j + 1) for j in range(3))
                )
            drawn = await session.draw(context, after=after, max_tokens=chance.randint(1, 60))
            if k and chance.random() < 0.15:
                session.kill(drawn.number)
            else:
                turn = drawn if chance.random() < 0.9 else None
            await asyncio.sleep(chance.choice([0, 0, 0.5, 3.0]))
            if session.prompt.index % 12 == 5 and chance.random() < 0.3:
                raise EpisodeError("tool", "died")
        if turn is None:
            await session.draw(tokens_of([7]), max_tokens=5)

    async def close(self) -> None: ...


def _held(snapshot: LedgerSnapshot) -> int:
    return sum(tokens_of_slot(slot) for _, slot in snapshot.slots)


@pytest.mark.parametrize("seed", range(16))
def test_the_accounts_of_wild_agents_add_up_over_a_stop_and_a_kill(seed: int) -> None:
    """The identities hold at each event: see `Accounts.check`."""
    chance = random.Random(seed)
    schedule = schedule_of(RUNS[seed % len(RUNS)], staleness=chance.choice([0.5, 1.0, 2.7]))
    options = {
        "agent": Wild(seed),
        "chance": chance.choice([mixed, None]),
        "greedy": chance.random() < 0.3,
        "retries": chance.choice([0, 2]),
        "validation_s": chance.choice([0.0, 2.0]),
        "replicas": 2,
    }
    stop_at = chance.uniform(0.5, 30.0)
    check_a_stop_and_a_kill(schedule, 30, stop_at, chance.randrange, _held, **options)
