"""A request that SGLang puts back into its queue keeps its tokens."""

from __future__ import annotations

import asyncio

import pytest

from millrace import testing
from millrace.testing import RolloutCase
from millrace.types import SamplingParams, Segment, Stop, tokens_of
from tests.serving.replica import PROMPT, Replica, gap

pytestmark = pytest.mark.xdist_group("engines")


@pytest.mark.parametrize("stop", [(), ("never said",)])
def test_an_interruption_returns_the_tokens_of_retracted_requests(
    replica: Replica, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...]
) -> None:
    engine = replica.engine
    monkeypatch.setattr(engine, "_decode", lambda tokens: "")

    async def main() -> tuple[list[tuple[Segment, ...]], int]:
        await replica.publish(40, 1)
        before = (await engine.stats()).tokens
        params = [SamplingParams(200, seed=i, ignore_eos=True, stop=stop) for i in range(6)]
        tasks = [
            asyncio.create_task(engine.generate(tokens_of(PROMPT[: 20 + i]), p, str(i)))
            for i, p in enumerate(params)
        ]
        await testing.rollouts._drawing(engine, 100, RolloutCase())
        await engine.call_workers("retract")
        await engine.interrupt()
        await engine.call_workers("resume")
        return await asyncio.gather(*tasks), (await engine.stats()).tokens - before

    results, drawn = runner.run(main())
    for i, (segment,) in enumerate(results):
        assert segment.stop is Stop.INTERRUPTED and 10 < len(segment.tokens) < 200
        assert gap(replica, 1, PROMPT[: 20 + i], (segment,))[0] < 1e-4
    assert sum(len(s.tokens) for (s,) in results) == drawn >= 100
