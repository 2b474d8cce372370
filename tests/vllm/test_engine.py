"""The vLLM engine on the CPU.

Conformance, log-probs, interruptions, refusals, start and end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace import testing
from millrace.errors import ConfigError, WorkerError
from millrace.models.model import write_shape
from millrace.testing import RolloutCase, joined
from millrace.types import SamplingParams, Segment, Stop, tokens_of
from tests.vllm.processes import engine_cores
from tests.vllm.replica import LENGTH, PROMPT, SHAPE, VOCABULARY, Replica, gap

pytestmark = pytest.mark.xdist_group("engines")


def test_conformance(
    replica: Replica, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine passes the conformance suite of its port.

    Sampled responses resume in another random stream, because vLLM's V1 runner cannot enter a
    stream midway.
    """

    async def keep_open() -> None:
        """Leave the engine open, because all checks of the suite share it and each closes it."""

    async def make() -> Any:
        return replica.engine

    monkeypatch.setattr(replica.engine, "close", keep_open)
    runner.run(testing.check_replica(make, RolloutCase(exact_resume=False, length=200)))


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


def test_linear_weights_are_not_packed_away(replica: Replica, runner: asyncio.Runner) -> None:
    assert runner.run(replica.engine.call_workers("linear_weights"))[0] > 10_000


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


def test_log_probs_wait_in_the_core_and_none_stay_there(
    replica: Replica, runner: asyncio.Runner
) -> None:
    """Of 24 requests, a third end, a third are interrupted and a third are cancelled."""
    runner.run(replica.publish(26, 1))
    engine = replica.engine
    states = engine._llm.output_processor.request_states

    def inner(name: str) -> int:
        return int(name.split("-")[0])

    async def held() -> dict[str, tuple[bytes, bytes]]:
        return dict(await engine._llm.engine_core.call_utility_async("drawn_so_far", None))

    async def main() -> list[tuple[Segment, ...]]:
        def ask(i: int) -> asyncio.Task[tuple[Segment, ...]]:
            most = LENGTH - i if i >= 8 else 20
            params = SamplingParams(
                max_tokens=most, ignore_eos=True, seed=i, interruptible=8 <= i < 16
            )
            return asyncio.create_task(engine.generate(tokens_of([5 + i, *PROMPT]), params, str(i)))

        calls = [ask(i) for i in range(24)]
        ended = await asyncio.gather(*calls[:8])
        waiting = await held()
        assert len(waiting) == 16 and all(len(floats) >= 4 for floats, _ in waiting.values())
        assert not any(state.logprobs_processor.logprobs for state in states.values()), (
            "nothing is sent before the end"
        )
        await engine.interrupt()
        kept = [len(joined(call.result())) * 4 for call in calls[8:16]]
        assert len(await held()) == 8 and all(
            n >= len(waiting[name][0])
            for n, name in zip(kept, sorted(waiting, key=inner)[:8], strict=True)
        )
        before = await engine.stats()
        for call in calls[16:]:
            call.cancel()
        await asyncio.wait(calls[16:])
        after = await engine.stats()
        assert after.tokens >= before.tokens
        assert 8 <= after.cancelled_tokens - before.cancelled_tokens < 8 * LENGTH
        return [*ended, *(call.result() for call in calls[8:16])]

    results = runner.run(main())
    assert not runner.run(held())
    for i, segments in enumerate(results):
        assert segments[-1].stop is (Stop.LENGTH if i < 8 else Stop.INTERRUPTED) and len(
            joined(segments)
        ) >= (20 if i < 8 else 0)
        assert max(gap(replica, 1, [5 + i, *PROMPT], segments)) < 1e-4


def test_an_interrupt_loses_nothing_that_was_counted_though_some_are_just_ending(
    replica: Replica, runner: asyncio.Runner
) -> None:
    runner.run(replica.publish(27, 1))
    engine = replica.engine

    async def main(round_: int) -> tuple[dict[int, int], list[tuple[Segment, ...]]]:
        params = [
            SamplingParams(max_tokens=50 - i, ignore_eos=True, seed=i) for i in range(40)
        ]  # the last request ends first
        calls = [
            asyncio.create_task(engine.generate(tokens_of([5 + round_, i]), p, str(i)))
            for i, p in enumerate(params)
        ]
        while not any(call.done() for call in calls):  # noqa: ASYNC110 (of forty tasks)
            await asyncio.sleep(0)
        counts = {r.params.seed: engine._count(r) for r in engine._active.values()}
        await engine.interrupt()
        return counts, list(await asyncio.gather(*calls))

    for round_ in range(6):
        counts, results = runner.run(main(round_))
        assert sum(counts.values()) > 100
        assert [
            i
            for i, count in counts.items()
            if (len(joined(results[i])) if results[i] else 0) < count
        ] == []


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


def test_sleep_needs_an_idle_engine(replica: Replica, runner: asyncio.Runner) -> None:
    async def main() -> None:
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

    runner.run(main())


def test_bad_settings_are_refused_before_vllm_starts(replica: Replica, tmp_path: Path) -> None:
    from millrace.serving.vllm import engine as vllm_rollout

    wrong = replica.config.model_copy(
        update={
            "rollout": replica.config.rollout.model_copy(
                update={"engine_kwargs": {"max_model_length": 4}}
            )
        }
    )
    with pytest.raises(ConfigError, match=r"max_model_length.*max_model_len"):
        vllm_rollout.build(wrong.sides, wrong.model, str(replica.folder))
    elsewhere = replica.config.model_copy(
        update={"trainer": replica.config.trainer.model_copy(update={"device": "cuda"})}
    )
    with pytest.raises(ConfigError, match="the installed vLLM is a build for CPUs"):
        vllm_rollout.build(elsewhere.sides, elsewhere.model, str(replica.folder))
    write_shape(
        tmp_path, SHAPE.model_copy(update={"num_attention_heads": 4}), vocab_size=VOCABULARY
    )
    with pytest.raises(ConfigError, match="a head size of 32 or more, and the model has 16"):
        vllm_rollout.build(replica.config.sides, replica.config.model, str(tmp_path))


@contextmanager
def output_in(log: Path) -> Iterator[None]:
    """Write the output of this process and its new children to a log, as in a worker of a run."""
    kept = {number: os.dup(number) for number in (1, 2)}
    with log.open("ab") as file:
        for number in kept:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        for number, own in kept.items():
            os.dup2(own, number)
            os.close(own)


def test_vllms_own_reason_is_told_where_it_does_not_start(
    replica: Replica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reports only that a process ended. It leaves the cause, most often memory, in a log.

    A core that fails may not end by itself if the process has another engine, as here.
    """
    from millrace.serving.vllm import engine as vllm_rollout

    before = engine_cores()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "100000")
    reason = "vLLM did not start: RuntimeError: Worker failed with error 'Available memory"
    with output_in(tmp_path / "log"), pytest.raises(WorkerError, match=reason):
        vllm_rollout.build(replica.config.sides, replica.config.model, str(replica.folder))
    assert engine_cores() == before, "the failed core has ended"


def test_logits_are_float32_whatever_the_models_dtype(
    replica: Replica, runner: asyncio.Runner
) -> None:
    """Logits that are rounded to bf16 differ from the train engine's."""
    from millrace.serving.vllm.arguments import engine_arguments

    half = replica.config.model.model_copy(update={"dtype": "bfloat16"})
    asked = engine_arguments(replica.config.sides, half, str(replica.folder))
    (dtypes,) = runner.run(replica.engine.call_workers("dtypes_of_a_model", asked))
    assert dtypes == ["torch.bfloat16", "torch.float32"]
