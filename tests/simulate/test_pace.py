"""With request_s, a decode step takes longer the more requests draw."""

from __future__ import annotations

import asyncio

import pytest

from millrace.simulate import clock
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimRolloutEngine
from millrace.types import SamplingParams, Segment, tokens_of

COST = CostModel(token_s=0.01, request_s=0.001)


async def draw(engine: SimRolloutEngine, tokens: int) -> tuple[float, tuple[Segment, ...]]:
    """Return the seconds that a request takes, and its segments."""
    start = asyncio.get_running_loop().time()
    params = SamplingParams(tokens, ignore_eos=True)
    segments = await engine.generate(tokens_of([1]), params, "0/0")
    return asyncio.get_running_loop().time() - start, segments


async def together(cost: CostModel, *lengths: int, slots: int = 64) -> list[float]:
    engine = SimRolloutEngine(cost, slots=slots, version=0)
    return [s for s, _ in await asyncio.gather(*(draw(engine, n) for n in lengths))]


def test_a_step_pays_for_each_request_that_takes_part_in_it() -> None:
    """The second request draws its last 100 tokens alone."""
    assert clock.run(together(COST, 100)) == pytest.approx([1.1])
    assert clock.run(together(COST, 100, 200)) == pytest.approx([1.2, 1.2 + 1.1])


def test_a_request_without_a_slot_pays_nothing_and_costs_nothing() -> None:
    assert clock.run(together(COST, 100, 50, slots=1)) == pytest.approx([1.1, 1.65])


@pytest.mark.virtual_clock
async def test_an_interruption_keeps_the_tokens_of_the_steps_so_far() -> None:
    engine = SimRolloutEngine(COST, slots=64, version=0)
    requests = [asyncio.ensure_future(draw(engine, n)) for n in (10, 100)]
    await asyncio.sleep(0.12 + 0.11 + 0.005)  # 10 steps of two requests, 10 of one
    await engine.interrupt()
    drawn = [
        sum(len(s.tokens) for s in segments) for _, segments in await asyncio.gather(*requests)
    ]
    assert (await engine.stats()).tokens == sum(drawn)
    assert drawn == [10, 20]


def test_without_it_steps_take_the_same_time_for_any_number_of_requests() -> None:
    flat = CostModel(token_s=0.01)
    assert clock.run(together(flat, 100, 100, 50)) == pytest.approx([1.0, 1.0, 0.5])
