"""The vLLM engine on the CPU.

Conformance, log-probs, interruptions, refusals, start and end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.errors import ConfigError, WorkerError
from millrace.models.model import write_shape
from millrace.testing import joined
from millrace.types import SamplingParams, Segment, Stop, tokens_of
from tests.serving.replica import LENGTH, PROMPT, SHAPE, VOCABULARY, Replica, gap
from tests.vllm.processes import engine_cores

pytestmark = pytest.mark.xdist_group("engines")


def test_linear_weights_are_not_packed_away(replica: Replica, runner: asyncio.Runner) -> None:
    assert runner.run(replica.engine.call_workers("linear_weights"))[0] > 10_000


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
