"""Thousands of requests under swaps, interruptions and cancellations: nothing lost, none twice.

The scheduler writes its own log: the version whose weights were live when it launched each step.
`MILLRACE_LOAD` sets the number of requests.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
from typing import Any

import pytest

from millrace.types import SamplingParams, Segment, Stop, Tokens, tokens_of
from tests.serving.replica import PROMPT, Replica, gap
from tests.sweeps import sweep

pytestmark = pytest.mark.xdist_group("engines")
REQUESTS = int(os.environ.get("MILLRACE_LOAD", "1500"))


@pytest.mark.parametrize("kv", sweep(["keep", "recompute"], "keep".__eq__))
def test_versions_equal_the_schedulers_own_log(
    replica: Replica, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    engine, draw = replica.engine, random.Random(kv)
    drawn_by: dict[str, list[tuple[str, int]]] = {}
    """SGLang's requests of each response, and how many of their tokens it has."""
    result = engine._result

    async def watched(request: Any) -> Any:
        drawn = await result(request)
        again = drawn.reason == "abort" and request.restart and not request.interrupted
        own = drawn_by.setdefault(request.session, [])
        own.append((request.id, 0 if again else len(drawn.tokens)))
        return drawn

    monkeypatch.setattr(engine, "_result", watched)
    returned: dict[str, tuple[Tokens, list[Segment]]] = {}
    """The prompt and the segments of each request, by the number of its call."""

    async def respond(number: int, limit: asyncio.Semaphore) -> None:
        """Draw a response, again after each interruption, as an episode does."""
        async with limit:
            prompt = tokens_of([3 + number % 40, *PROMPT[: 4 + number % 30]])
            left = draw.randrange(4, 60)
            drawn: list[Segment] = []
            while left:
                params = SamplingParams(left, seed=number, ignore_eos=True)
                context = prompt + sum((s.tokens for s in drawn), tokens_of())
                segments = await engine.generate(context, params, str(number))
                drawn += segments
                left -= sum(len(s.tokens) for s in segments)
                if segments and segments[-1].stop is Stop.LENGTH:
                    assert not left
            returned[str(number)] = prompt, drawn

    async def main() -> Any:
        await replica.publish(1000, 1)
        engine._recompute = kv == "recompute"
        await engine.call_workers("start_log")
        before = await engine.stats()
        limit = asyncio.Semaphore(48)
        tasks = [asyncio.create_task(respond(i, limit)) for i in range(REQUESTS)]
        version = cancelled = 1000
        while not all(task.done() for task in tasks):
            await asyncio.sleep(draw.random() * 0.1)
            match draw.randrange(3):
                case 0:
                    await engine.interrupt()
                case 1:
                    running = [t for t in tasks if not t.done()]
                    if running and cancelled > 1000 - REQUESTS // 20:
                        draw.choice(running).cancel()
                        cancelled -= 1
            version += 1
            await replica.publish(version, 1 + version % 2)
        await asyncio.wait(tasks)
        engine._recompute = False
        for task in tasks:
            assert task.cancelled() or task.exception() is None, task.exception()
        return version, before, await engine.stats(), (await engine.call_workers("take_log"))[0]

    version, before, after, log = runner.run(main())
    steps = sum(len(versions) for versions in log.values())
    assert version - 1000 > 10
    assert after.tokens - before.tokens == steps, "each drawn token is counted once"
    assert len(returned) > 0.9 * REQUESTS
    for number, (_, segments) in returned.items():
        logged: list[int] = []
        for name, count in drawn_by[number]:
            logged += log.get(name, [])[:count]
        assert [s.version for s in segments for _ in s.tokens] == logged, number
    for prompt, segments in list(returned.values())[:40]:
        if {s.version for s in segments} == {segments[0].version}:
            assert (
                max(gap(replica, 1 + segments[0].version % 2, list(prompt), tuple(segments))) < 1e-4
            )


def test_a_swap_waits_for_requests_that_its_call_has_overtaken(
    replica: Replica, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests and the calls of a swap have sockets of their own."""
    engine = replica.engine
    dispatch = engine._manager._dispatch_to_scheduler

    async def main() -> tuple[Segment, ...]:
        await replica.publish(5000, 1)
        loop = asyncio.get_running_loop()
        late = functools.partial(loop.call_later, 0.5, dispatch)
        monkeypatch.setattr(engine._manager, "_dispatch_to_scheduler", late)
        params = SamplingParams(20, seed=1, ignore_eos=True)
        drawing = asyncio.create_task(engine.generate(tokens_of(PROMPT), params, "late"))
        while not engine._manager.sent:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
        monkeypatch.undo()
        await replica.publish(5001, 2)
        return await drawing

    segments = runner.run(main())
    assert segments[-1].version == 5001
    assert sum(len(s.tokens) for s in segments) == 20
