"""Tests that a session's KV, kept between its turns, changes nothing but the tokens read."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from millrace.decode.prefix_cache import KeptKV
from millrace.errors import SyncError
from millrace.testing import joined
from millrace.types import SamplingParams, tokens_of
from tests.decode.helpers import EOS, SHAPE, WIDE, engine, error, llama, prompt, qwen, turns

_CLOSE = 1e-5
"""A new read of a response has other bits than its decoding, so log-probs are close, not equal."""


async def episode(
    eng: Any, i: int, *, waits: bool = False, interrupts: bool = False, length: int = 5
) -> list[Any]:
    """Return (context, segments) of the turns of one session, with a user's words between them."""
    draw, context, said = random.Random(i), prompt(i), []
    for turn in range(length):
        left, offset, seed = draw.randrange(1, 12), 0, 10 * i + turn
        while left:
            params = SamplingParams(left, seed=seed, offset=offset, ignore_eos=True)
            segments = await eng.generate(context, params, f"{i}/0")
            said.append((context, segments))
            drawn = joined(segments)
            context, left, offset = context + drawn, left - len(drawn), offset + len(drawn)
            if not interrupts:
                break
            await turns(2)
        context = context + prompt(100 * i + turn, draw.randrange(1, 8))
        if waits:
            await turns(draw.randrange(0, 30))
    return said


def words(said: list[Any]) -> list[int]:
    return [token for _, segments in said for token in joined(segments)]


@pytest.mark.parametrize("make_model", [qwen, llama, lambda: qwen(shape=WIDE)])
@pytest.mark.parametrize("kept_slots", [2, 30])
def test_sessions_that_keep_their_kv_draw_the_same_tokens_and_read_only_new_ones(
    make_model: Any, kept_slots: int
) -> None:
    """Twenty sessions share eight slots. With room for two sequences, most KV is evicted."""

    async def run(kept: int) -> Any:
        eng = engine(make_model(), kept_slots=kept, max_len=128)
        said = await asyncio.gather(*(episode(eng, i, waits=True) for i in range(20)))
        return said, await eng.stats(), eng

    (kept, stats, eng), (read, whole, _) = asyncio.run(run(kept_slots)), asyncio.run(run(0))
    assert [words(s) for s in kept] == [words(s) for s in read]
    reference = make_model()
    for context, (segment,) in (turn for said in kept for turn in said):
        assert error(reference, context, segment) < _CLOSE
    total = sum(len(context) for said in kept for context, _ in said)
    assert whole.prefill_tokens == total == stats.prefill_tokens + stats.reused_tokens
    assert eng._decoder.kept.tokens <= kept_slots * 128
    if kept_slots == 30:
        # Each turn reads the last token drawn before, and what the user said.
        new = sum(
            len(context) - (len(said[k - 1][0]) + len(joined(said[k - 1][1])) - 1 if k else 0)
            for said in kept
            for k, (context, _) in enumerate(said)
        )
        assert stats.prefill_tokens == new < total / 3 and not stats.evicted_tokens
    else:
        assert stats.evicted_tokens and stats.reused_tokens


@pytest.mark.parametrize("shape", [SHAPE, WIDE])
def test_a_response_that_is_interrupted_anywhere_has_the_bits_of_an_undisturbed_one(
    shape: Any,
) -> None:
    """The kept K and V are those with which the tokens were drawn, and the shapes are the same."""

    async def run(stop_after: int) -> Any:
        eng = engine(qwen(shape=shape), kept_slots=4)
        context, done = prompt(1, 6), tokens_of()
        floats = []
        while len(done) < 14:
            params = SamplingParams(14 - len(done), seed=3, offset=len(done), ignore_eos=True)
            task = asyncio.create_task(eng.generate(context + done, params, "1/0"))
            if stop_after and not done:
                await turns(stop_after + 1)
                await eng.interrupt()
            for segment in await task:
                done = done + segment.tokens
                floats += list(segment.log_probs)
        return done, floats, (await eng.stats()).prefill_tokens

    tokens, floats, read = asyncio.run(run(0))
    for stop_after in range(1, 14):
        # The last drawn token has no K and V yet. Decoding reads it, as it would have anyway.
        assert asyncio.run(run(stop_after)) == (tokens, floats, read + 1)


def test_interrupts_without_a_swap_keep_everything() -> None:
    async def run(kept: int, interrupts: bool) -> Any:
        eng = engine(kept_slots=kept, max_len=128)
        tasks = [asyncio.create_task(episode(eng, i, interrupts=interrupts)) for i in range(12)]
        while interrupts and not all(t.done() for t in tasks):
            await turns(7)
            await eng.interrupt()
        return [words(await t) for t in tasks], await eng.stats()

    quiet, _ = asyncio.run(run(0, False))
    disturbed, stats = asyncio.run(run(30, True))
    assert disturbed == quiet
    assert not stats.evicted_tokens and stats.reused_tokens > stats.prefill_tokens


@pytest.mark.parametrize("keep", [True, False])
def test_a_swap_keeps_the_kv_of_idle_sessions_only_if_it_may(keep: bool) -> None:
    """The second turn is drawn after a swap. With equal weights, its tokens are the same."""

    async def run(**changes: Any) -> Any:
        eng = engine(kept_slots=8, version=3, **changes)
        context = prompt(1, 20)
        first = await eng.generate(context, SamplingParams(8, seed=1, ignore_eos=True), "1/0")
        await eng.swap(4, eng.weights())
        again = context + joined(first) + prompt(2, 3)
        params = SamplingParams(8, seed=2, ignore_eos=True)
        second = await eng.generate(again, params, "1/0")
        other = await eng.generate(again, params, "2/0")
        return second, other, await eng.stats()

    (second,), (other,), stats = asyncio.run(run(kv_on_swap="keep" if keep else "recompute"))
    assert second.tokens == other.tokens and second.version == other.version == 4
    assert second.kv_version == (3 if keep else None) and other.kv_version is None
    assert stats.reused_tokens == (27 if keep else 0)


def test_a_swap_after_an_interruption_drops_all_and_so_does_another_run() -> None:
    async def read_after(version: int, interrupt: bool) -> Any:
        eng = engine(kept_slots=8, version=3)
        context = prompt(1, 20)
        first = await eng.generate(context, SamplingParams(8, seed=1, ignore_eos=True), "1/0")
        if interrupt:
            await eng.interrupt()
        await eng.swap(version, dict(qwen(1).named_parameters()))
        again = context + joined(first) + prompt(2, 3)
        (second,) = await eng.generate(again, SamplingParams(8, seed=2, ignore_eos=True), "1/0")
        assert second.kv_version is None and error(qwen(1), again, second) < _CLOSE
        return (await eng.stats()).reused_tokens

    assert asyncio.run(read_after(4, True)) == 0
    assert asyncio.run(read_after(0, False)) == 0


async def test_old_kv_that_a_swap_left_behind_is_found_by_the_next_swap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eng = engine(kept_slots=8, kv_on_swap="recompute")
    await eng.generate(prompt(1), SamplingParams(5, ignore_eos=True), "1/0")
    await turns(5)
    with monkeypatch.context() as patch:
        patch.setattr(KeptKV, "drop_all", lambda self: None)
        await eng.swap(1, eng.weights())
    with pytest.raises(SyncError, match=r"KV of version 0 is kept, .* none before version 1"):
        await eng.swap(2, eng.weights())


async def test_old_kv_serves_only_what_continues_it() -> None:
    """A validation asks the same prompt of every version, under the same name."""

    eng = engine(kept_slots=8, version=3)
    await eng.generate(prompt(1, 20), SamplingParams(8, seed=1, ignore_eos=True), "val/1/0")
    await eng.swap(4, dict(qwen(1).named_parameters()))
    (segment,) = await eng.generate(
        prompt(1, 20), SamplingParams(8, seed=1, ignore_eos=True), "val/1/0"
    )
    assert segment.kv_version is None and error(qwen(1), prompt(1, 20), segment) < _CLOSE


def test_threads_of_one_session_reuse_what_they_share() -> None:
    """Two turns continue the same history in different ways, at the same time and later."""

    async def run(kept: int) -> Any:
        eng = engine(kept_slots=kept)
        base = prompt(1, 16)
        said = joined(await eng.generate(base, SamplingParams(6, seed=1, ignore_eos=True), "1/0"))

        def ask(i: int) -> Any:
            params = SamplingParams(5, seed=i, ignore_eos=True)
            return eng.generate(base + said + prompt(i, 4), params, "1/0")

        both = await asyncio.gather(ask(2), ask(3))
        return [joined(s) for s in (*both, await ask(4))], await eng.stats()

    (kept, stats), (read, _) = asyncio.run(run(8)), asyncio.run(run(0))
    assert kept == read
    # The last token of the first turn has no K and V at first. The third thread finds it read.
    assert stats.reused_tokens >= 21 + 21 + 22 and not stats.evicted_tokens


async def test_sleep_frees_the_kept_kv_and_cancelled_turns_keep_none() -> None:
    eng = engine(kept_slots=8)
    params = SamplingParams(6, seed=1, ignore_eos=True)
    await eng.generate(prompt(1, 16), params, "1/0")
    task = asyncio.create_task(eng.generate(prompt(2, 16), params, "2/0"))
    await turns(3)
    task.cancel()
    await turns(2)
    assert eng._decoder.kept.tokens == 21 and eng._decoder.cache.kept
    await eng.sleep()
    assert not eng._decoder.kept.tokens and not eng._decoder.cache.kept
    await eng.wake()
    await eng.generate(prompt(1, 20), params, "1/0")
    assert (await eng.stats()).reused_tokens == 0


def test_deterministic_mode_reads_every_history() -> None:
    async def run(kept: int) -> Any:
        eng = engine(kept_slots=kept, deterministic=True, slots=4)
        said = await asyncio.gather(*(episode(eng, i, length=3) for i in range(6)))
        return said, (await eng.stats()).reused_tokens

    assert asyncio.run(run(20)) == asyncio.run(run(0)) and asyncio.run(run(20))[1] == 0


def test_the_bookkeeping_gives_no_page_away_twice() -> None:
    """Random sessions extend, fork and repeat their contexts in 24 pages of 4 tokens."""
    draw, kept = random.Random(1), KeptKV(24, 4)
    last: dict[str, Any] = {}
    for step in range(3000):
        session = str(draw.randrange(9))
        before = last.get(session, np.array([EOS], dtype=np.int32))
        cut = draw.choice([len(before), draw.randrange(1, len(before) + 1)])
        new = [draw.randrange(3) for _ in range(draw.randrange(6))]
        tokens = np.concatenate((before[:cut], np.array(new, dtype=np.int32)))[:60]
        version = step // 500
        found, common = kept.find(session, tokens_of([*tokens.tolist(), 0]), version)
        if found is not None:
            assert found.session == session and (found.tokens[:common] == tokens[:common]).all()
            assert found.version == version or common == len(found.tokens)
            kept.use(found, common)
        kept.keep(session, tokens, version)
        last[session] = tokens
        pages = [page for entry in kept._order for page in entry.pages.tolist()]
        assert sorted(pages + kept._free) == list(range(24))
        assert all(len(e.pages) == -(-len(e.tokens) // 4) for e in kept._order)
        assert {id(e) for own in kept._sessions.values() for e in own} == {
            id(e) for e in kept._order
        }
    assert kept.evicted_tokens and kept.tokens


def test_a_context_that_cannot_fit_is_counted_and_evicts_nothing() -> None:
    kept = KeptKV(2, 4)
    assert kept.keep("a", np.arange(8, dtype=np.int32), 0) is not None
    assert kept.keep("b", np.arange(9, dtype=np.int32), 0) is None
    assert kept.evicted_tokens == 9 and kept.tokens == 8
