"""Sessions that draw, that wait at the gate, and that wait for a tool."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.observe.metrics import RunMetrics, Sessions
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.sample_queue import SampleQueue
from millrace.ports import PolicySession
from millrace.replicas.pool import RolloutPool
from millrace.rollout.sample import SampleRoller
from millrace.schedule.ledger import Ledger
from millrace.simulate import clock
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimReward, SimRolloutEngine
from millrace.types import Ending, Prompt, SamplingParams, Score, tokens_of
from millrace.waits.registry import current
from tests.pipeline.simulated import schedule_of


def test_averages_are_over_the_time_since_the_last_row() -> None:
    one = Sessions(100.0)
    one.change(100, live=4, drawing=0, gate=0)
    one.change(101, live=4, drawing=3, gate=0)
    one.change(103, live=4, drawing=1, gate=2)
    one.change(104, live=4, drawing=1, gate=1)
    row = {"agents/drawing": 7 / 4, "agents/at_gate": 2 / 4, "agents/waiting": 7 / 4}
    assert one.row(104) == row
    one.change(106, live=0, drawing=1, gate=1)  # Threads of a session that is over may still draw.
    one.change(108, live=0, drawing=0, gate=0)
    row = {"agents/drawing": 4 / 4, "agents/at_gate": 4 / 4, "agents/waiting": 4 / 4}
    assert one.row(108) == row


class Slow:
    """Two turns of ten tokens, and three seconds of a tool between them."""

    async def play(self, session: PolicySession) -> Ending:
        first = await session.draw(session.prompt.tokens, max_tokens=10)
        await asyncio.sleep(3)
        await session.draw(tokens_of([9]), after=first.number, max_tokens=10)
        return Ending(score=Score(1.0))

    async def close(self) -> None:
        return None


class Prompts:
    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, tokens_of([900]), "p", "sim")


def test_a_session_that_waits_for_a_tool_draws_nothing_and_has_no_slot() -> None:
    """Each turn takes one second, and the gate is closed for the last two of ten."""

    async def main() -> Any:
        queue = SampleQueue(Ledger(schedule_of("async_partial"), 12), deadline_s=100)
        pool = RolloutPool([SimRolloutEngine(CostModel(token_s=0.1), slots=64, version=0)])
        params = SamplingParams(200, ignore_eos=True)
        roller = SampleRoller(Slow(), SimReward(CostModel()), str, params, 1, 0)
        rollouter = Rollouter(queue, Prompts(), pool, roller)
        metrics = RunMetrics(0.0, shared=False, sessions=rollouter.tells_sessions)
        with current().registry.watched_by(metrics):
            async with asyncio.TaskGroup() as tasks:
                loop = tasks.create_task(rollouter.run())
                await asyncio.sleep(2)
                rollouter._gate.clear()
                await asyncio.sleep(4)
                now = asyncio.get_running_loop().time()
                row, stats = metrics.synced_row(now, lambda synced: {}), await pool.stats()
                loop.cancel()
        return row, stats

    row, stats = clock.run(main())
    live = row["agents/drawing"] + row["agents/at_gate"] + row["agents/waiting"]
    assert live == pytest.approx(12, abs=0.01)
    # Of six seconds: one draws, three wait for the tool, two wait at the gate.
    assert row["agents/drawing"] == pytest.approx(2, abs=0.01)
    assert row["agents/waiting"] == pytest.approx(6, abs=0.01)
    assert row["agents/at_gate"] == pytest.approx(4, abs=0.01)
    assert stats.busy_slot_s == pytest.approx(12, abs=0.1), "a slot for each second of drawing"
