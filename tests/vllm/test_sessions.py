"""Sessions of several turns on vLLM: what they read again after a swap of the weights."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.testing import joined
from millrace.types import SamplingParams, Segment, tokens_of
from millrace.vllm.requests import Salt, Salts
from tests.vllm.replica import PROMPT, Replica, gap

pytestmark = pytest.mark.timeout(300)


def second_turns(
    replica: Replica, runner: asyncio.Runner, version: int, *, kv: str, interrupt: bool
) -> tuple[list[int], tuple[Segment, ...], tuple[Segment, ...], int]:
    """Swap the weights between two turns of a session.

    Return the context of the second turn, the turn, the same turn of a new session, and the tokens
    that the second turn did not read.
    """
    engine, params = replica.engine, SamplingParams(max_tokens=40, ignore_eos=True, seed=4)

    async def main() -> Any:
        await replica.publish(version, 1)
        first = joined(await engine.generate(tokens_of(PROMPT), params, f"{version}/0"))
        if interrupt:
            await engine.interrupt()
        engine._recompute = kv == "recompute"
        await replica.publish(version + 1, 2)
        engine._recompute = False
        context = [*PROMPT, *first, 5, 6, 7]
        before = (await engine.stats()).reused_tokens
        second = await engine.generate(tokens_of(context), params, f"{version}/0")
        reused = (await engine.stats()).reused_tokens - before
        new = await engine.generate(tokens_of(context), params, f"{version}/1")
        return context, second, new, reused

    return runner.run(main())  # type: ignore[no-any-return]


def test_a_session_keeps_its_kv_over_a_swap_and_says_so(
    replica: Replica, runner: asyncio.Runner
) -> None:
    context, second, new, reused = second_turns(replica, runner, 200, kv="keep", interrupt=False)
    assert reused >= 128, "a block of the prompt was in the cache"
    assert [(s.version, s.kv_version) for s in second] == [(201, 200)]
    assert gap(replica, 2, context, second)[0] > 0.01, "some K and V are of the old weights"
    assert [(s.version, s.kv_version) for s in new] == [(201, None)]
    assert gap(replica, 2, context, new)[0] < 1e-4


@pytest.mark.parametrize(
    ("kv", "interrupt", "version"), [("recompute", False, 210), ("keep", True, 220)]
)
def test_a_session_reads_its_history_again_where_the_schedule_says_so(
    replica: Replica, runner: asyncio.Runner, kv: str, interrupt: bool, version: int
) -> None:
    context, second, new, reused = second_turns(
        replica, runner, version, kv=kv, interrupt=interrupt
    )
    assert reused == 0
    for segments in (second, new):
        assert [(s.version, s.kv_version) for s in segments] == [(version + 1, None)]
        assert gap(replica, 2, context, segments)[0] < 1e-4


def test_only_what_continues_a_context_gets_its_salt() -> None:
    salts, newest, old = Salts(), Salt(9, 7), Salt(3, 2)
    salts.remember("1/0", tokens_of([1, 2, 3]), old)
    salts.remember("1/0", tokens_of([1, 2, 3, 4, 5]), Salt(4, 3))
    assert salts.of("1/0", tokens_of([1, 2, 3, 4]), newest) == old
    assert salts.of("1/0", tokens_of([1, 2, 3, 4, 5, 6]), newest) == Salt(4, 3)
    assert salts.of("1/0", tokens_of([1, 2]), newest) == newest, "a validation's next question"
    assert salts.of("1/0", tokens_of([1, 9, 3, 4]), newest) == newest
    assert salts.of("1/1", tokens_of([1, 2, 3, 4]), newest) == newest
    for i in range(Salts.CONTEXTS):
        salts.remember("1/0", tokens_of([7, i]), newest)
    assert salts.of("1/0", tokens_of([1, 2, 3, 4]), newest) == newest, "it was forgotten"
    for i in range(Salts.SESSIONS + 5):
        salts.remember(str(i), tokens_of([i]), old)
    assert len(salts._known) == Salts.SESSIONS
    assert salts.of("0", tokens_of([0, 1]), newest) == newest
