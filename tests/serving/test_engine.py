"""A serving engine on the CPU: conformance, log-probs, stop strings, sleep."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace import testing
from millrace.errors import WorkerError
from millrace.testing import RolloutCase, joined
from millrace.types import SamplingParams, Segment, Stop, tokens_of
from tests.serving.replica import ENGINE, PROMPT, Replica, gap

pytestmark = pytest.mark.xdist_group("engines")


def test_conformance(
    replica: Replica, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine passes the conformance suite of its port.

    With vLLM, sampled responses resume in another random stream, because its V1 runner cannot enter
    a stream midway.
    """

    async def keep_open() -> None:
        """Leave the engine open, because all checks of the suite share it and each closes it."""

    async def make() -> Any:
        return replica.engine

    monkeypatch.setattr(replica.engine, "close", keep_open)
    runner.run(
        testing.check_replica(
            make, RolloutCase(exact_resume=ENGINE == "sglang", length=200, poll_s=0.001)
        )
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_sampling_temperature(
    replica: Replica, runner: asyncio.Runner, temperature: float
) -> None:
    runner.run(replica.publish(1, 1))
    params = SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True, seed=3)
    segments = runner.run(replica.engine.generate(tokens_of(PROMPT), params, "s"))
    assert gap(replica, 1, PROMPT, segments, temperature)[0] < 1e-4
    if temperature != 1:
        assert gap(replica, 1, PROMPT, segments, 1.0)[0] > 0.05


def test_more_prompts_than_a_step_takes_wait_whole(
    replica: Replica, runner: asyncio.Runner
) -> None:
    """vLLM would read part of a prompt. On a CPU, that makes it fail for requests with seeds."""
    runner.run(replica.publish(25, 1))

    async def main() -> list[tuple[Segment, ...]]:
        params = [SamplingParams(max_tokens=4, ignore_eos=True, seed=i) for i in range(12)]
        prompts = [
            [i, *PROMPT[: 140 + i]] for i in range(12)
        ]  # no prompt is another's prefix, and three fill a step
        calls = (
            replica.engine.generate(tokens_of(p), s, str(i))
            for i, (p, s) in enumerate(zip(prompts, params, strict=True))
        )
        return list(await asyncio.gather(*calls))

    for i, segments in enumerate(runner.run(main())):
        assert gap(replica, 1, [i, *PROMPT[: 140 + i]], segments)[0] < 1e-4


def test_stop_strings_end_a_response_where_they_are_complete(
    replica: Replica, runner: asyncio.Runner
) -> None:
    runner.run(replica.publish(30, 1))
    engine, honest = replica.engine, replica.engine._decode
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    engine._decode = lambda tokens: "".join(letters[t] for t in tokens)
    try:
        free = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
        whole = joined(runner.run(engine.generate(tokens_of(PROMPT), free, "s")))
        text = engine._decode(whole)
        stop = text[20:22]
        end = text.index(stop) + 2
        params = SamplingParams(
            max_tokens=60, ignore_eos=True, temperature=0.0, stop=(stop, "never said")
        )
        (segment,) = runner.run(engine.generate(tokens_of(PROMPT), params, "s"))
        assert segment.stop is Stop.STRING and segment.tokens == whole[:end]
    finally:
        engine._decode = honest


async def test_sleep_needs_an_idle_engine(replica: Replica, runner: asyncio.Runner) -> None:
    task = asyncio.create_task(
        replica.engine.generate(
            tokens_of(PROMPT), SamplingParams(max_tokens=200, ignore_eos=True), "s"
        )
    )
    await testing.rollouts._drawing(replica.engine, 2, RolloutCase())
    with pytest.raises(WorkerError, match=r"sleep\(\) with 1 running requests"):
        await replica.engine.sleep()
    await task
    await replica.engine.sleep()
    with pytest.raises(WorkerError, match="asleep"):
        await replica.engine.generate(tokens_of([3]), SamplingParams(max_tokens=2), "s")
    await replica.engine.wake()
