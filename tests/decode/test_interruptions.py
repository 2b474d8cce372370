"""Tests of running requests during swaps, interruptions, failures and sleep."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from millrace.errors import SyncError, WorkerError
from millrace.testing import joined
from millrace.types import Stop
from tests.decode.helpers import engine, error, long, prompt, qwen, turns


def test_swapped_weights_draw_the_tokens_after_the_swap_and_segments_say_so() -> None:
    """In `keep` mode, log-probs after the swap come from new weights over old K and V.

    Neither model alone gives these log-probs, but the tokens were drawn with them.
    """
    old, new = qwen(0), qwen(1)

    async def run(kv_on_swap: Any) -> Any:
        eng = engine(qwen(0), kv_on_swap=kv_on_swap, slots=4, version=3)
        tasks = [
            asyncio.create_task(eng.generate(prompt(i), long(40, seed=i), "s")) for i in range(6)
        ]
        await turns(12)
        seconds = await eng.swap(4, dict(new.named_parameters()))
        assert seconds > 0
        return await asyncio.gather(*tasks)

    for mode in ("recompute", "keep"):
        for i, segments in enumerate(asyncio.run(run(mode))):
            drawn_late = i >= 4  # these waited for a slot
            assert [s.version for s in segments] == ([4] if drawn_late else [3, 4])
            assert sum(len(s.tokens) for s in segments) == 40
            assert [s.stop for s in segments] == [None] * (len(segments) - 1) + [Stop.LENGTH]
            context = prompt(i)
            if not drawn_late:
                assert error(old, context, segments[0]) < 1e-5
                assert error(new, context, segments[0]) > 0.1
            after = error(new, context + joined(segments[:-1]), segments[-1])
            if mode == "recompute" or drawn_late:
                assert after < 1e-5
            else:
                assert after > 1e-3
                assert mixed_error(old, new, context + segments[0].tokens, segments[1]) < 1e-5


@torch.inference_mode()
def mixed_error(old: Any, new: Any, context: Any, segment: Any) -> float:
    """Return the largest error against a forward pass of `new` over the K and V of `old`.

    The K and V of `old` cover `context` without its last token.
    """
    cache = old(torch.tensor([[*context[:-1]]]), use_cache=True).past_key_values
    ids = torch.tensor([[context[-1], *segment.tokens]])
    logits = new(ids, past_key_values=cache, use_cache=True).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    return (expected - torch.tensor(segment.log_probs)).abs().max().item()


async def test_two_swaps_between_the_same_two_tokens_leave_no_empty_segment() -> None:
    eng = engine()
    task = asyncio.create_task(eng.generate(prompt(0), long(20), "s"))
    await turns(6)
    await eng.swap(1, eng.weights())
    await eng.swap(2, eng.weights())
    assert [s.version for s in await task] == [0, 2]


def test_a_swap_that_does_not_fit_raises_and_copies_nothing() -> None:
    eng = engine()
    staged = {name: tensor.clone() + 1 for name, tensor in eng.weights().items()}
    before = {name: tensor.clone() for name, tensor in eng.weights().items()}
    first, last = next(iter(staged)), list(staged)[-1]
    for wrong in (
        {**staged, last: torch.zeros(3)},
        {k: v for k, v in staged.items() if k != first},
        {**staged, "other": before[first]},
    ):
        with pytest.raises(SyncError):
            asyncio.run(eng.swap(1, wrong))
    assert eng.version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in eng.weights().items())


async def test_interruption_with_a_swap_between_goes_on_under_the_new_weights() -> None:
    new = qwen(1)

    eng = engine(slots=4)
    tasks = [asyncio.create_task(eng.generate(prompt(i), long(30, seed=i), "s")) for i in range(6)]
    await turns(9)
    await eng.interrupt()
    first = [t.result() for t in tasks]
    assert not eng._pending()
    await eng.swap(1, dict(new.named_parameters()))
    calls = []
    for i, segments in enumerate(first):
        done = joined(segments)
        calls.append(
            eng.generate(prompt(i) + done, long(30 - len(done), seed=i, offset=len(done)), "s")
        )
    rests = await asyncio.gather(*calls)
    for i, (before, rest) in enumerate(zip(first, rests, strict=True)):
        assert before == () if i >= 4 else before[-1].stop is Stop.INTERRUPTED
        assert [s.version for s in rest] == [1]
        assert len(joined(before)) + len(joined(rest)) == 30
        assert error(new, prompt(i) + joined(before), rest[0]) < 1e-5


async def test_an_error_in_the_loop_fails_every_caller_with_that_error() -> None:
    eng = engine(slots=2)
    tasks = [asyncio.create_task(eng.generate(prompt(i), long(50), "s")) for i in range(5)]
    await turns(5)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise FloatingPointError("lost the device")

    eng._decoder._call = broken  # type: ignore[assignment, method-assign]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(r) for r in results] == [FloatingPointError] * 5
    with pytest.raises(WorkerError, match="lost the device"):
        await eng.generate(prompt(0), long(1), "s")


async def test_asleep_and_closed_engines_refuse_and_a_busy_one_does_not_sleep() -> None:
    eng = engine()
    task = asyncio.create_task(eng.generate(prompt(0), long(50), "s"))
    await turns(3)
    with pytest.raises(WorkerError, match="1 unfinished requests"):
        await eng.sleep()
    await task
    await eng.sleep()
    assert not eng._decoder.cache.layers
    with pytest.raises(WorkerError, match="asleep"):
        await eng.generate(prompt(0), long(1), "s")
    await eng.wake()
    task = asyncio.create_task(eng.generate(prompt(0), long(50), "s"))
    await turns(3)
    await eng.close()
    with pytest.raises(WorkerError, match="closed"):
        await task
    with pytest.raises(WorkerError, match="closed"):
        await eng.generate(prompt(0), long(1), "s")


async def test_cancelled_requests_free_their_slots_at_once_running_or_queued() -> None:
    eng = engine(slots=2)
    tasks = [asyncio.create_task(eng.generate(prompt(i), long(60), "s")) for i in range(6)]
    await turns(4)
    for i in (0, 3, 5):
        tasks[i].cancel()
    await turns(3)
    assert eng._table.occupied == 2 and len(eng._queue) == 1
    kept = await asyncio.gather(*(tasks[i] for i in (1, 2, 4)))
    assert [len(joined(r)) for r in kept] == [60] * 3
    stats = await eng.stats()
    assert stats.cancelled_tokens > 0 and stats.tokens == 180 + stats.cancelled_tokens
    assert (
        max([error(qwen(), prompt(i), s) for i, (s,) in zip((1, 2, 4), kept, strict=True)]) < 1e-5
    )
