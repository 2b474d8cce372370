"""The conformance checks of rollout engines, and of replicas that share devices."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.ports import Replica, RolloutEngine
from millrace.types import (
    Author,
    SamplingParams,
    Segment,
    Stop,
    Tokens,
    tokens_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutCase:
    """The requests and limits of the checks of a rollout engine."""

    prompts: tuple[tuple[int, ...], ...] = (
        (3, 4, 5, 6),
        (7, 3),
        (5, 5, 5, 5, 5, 4),
        (6,),
        (4, 7, 3, 6, 5),
    )
    """Token ids that the engine's model knows."""
    length: int = 48
    """Number of tokens of a long response.

    With any of the prompts, it must fit in the engine. It must be so long that an interruption
    comes before its end.
    """
    exact_resume: bool = True
    """Whether a *sampled* response that resumes with its offset equals an uninterrupted one."""
    poll_s: float = 0.0005
    """Seconds between two calls of stats(). Several calls must fit in one long response."""
    timeout_s: float = 300.0
    """Time limit of each check, in seconds. It bounds hangs alone."""


async def check_rollout_engine(
    make: Callable[[], Awaitable[RolloutEngine]], case: RolloutCase | None = None
) -> None:
    """Run every check of a RolloutEngine, each on a fresh engine from `make`."""
    await _check_rollouts(_ROLLOUT_CHECKS, make, case or RolloutCase())


async def check_replica(
    make: Callable[[], Awaitable[Replica]], case: RolloutCase | None = None
) -> None:
    """Run the checks of a RolloutEngine, and those for shared devices."""
    await check_rollout_engine(make, case)
    await _check_rollouts((_sleep_and_wake,), make, case or RolloutCase())


async def _check_rollouts(
    checks: Sequence[Callable[[Any, RolloutCase], Awaitable[None]]],
    make: Callable[[], Awaitable[RolloutEngine]],
    case: RolloutCase,
) -> None:
    for check in checks:
        engine = await make()
        try:
            await asyncio.wait_for(check(engine, case), case.timeout_s)
        except TimeoutError:
            raise AssertionError(
                f"{check.__name__}: still waiting after {case.timeout_s} s"
            ) from None
        finally:
            await engine.close()


def joined(segments: Sequence[Segment]) -> Tokens:
    """Return the tokens of `segments`, in order."""
    out = tokens_of()
    for segment in segments:
        out.extend(segment.tokens)
    return out


def _well_formed(segments: tuple[Segment, ...], params: SamplingParams) -> None:
    for segment in segments:
        assert isinstance(segment.tokens, array) and segment.tokens.typecode == "i", (
            "tokens must be array('i')"
        )
        assert isinstance(segment.log_probs, array) and segment.log_probs.typecode == "f", (
            "log_probs must be array('f')"
        )
        assert segment.tokens, "a segment without tokens"
        assert segment.author is Author.POLICY, (
            f"the author of an engine's segment is the policy, not {segment.author}"
        )
        assert segment.version >= 0, (
            f"version {segment.version}: each segment has the version that drew it"
        )
        assert len(segment.log_probs) == len(segment.tokens), "one log-prob for each token"
        bad = [x for x in segment.log_probs if not (math.isfinite(x) and x <= 1e-6)]
        assert not bad, f"log-probs are finite and not positive, found {bad[:3]}"
    assert all(s.stop is None for s in segments[:-1]), "only the last segment has a stop"
    if segments:
        assert segments[-1].stop is not None, "the last segment has a stop"
    total = len(joined(segments))
    assert total <= params.max_tokens, f"{total} tokens for max_tokens={params.max_tokens}"


async def _generate(
    engine: RolloutEngine, prompt: Sequence[int], params: SamplingParams, session: str = "s"
) -> tuple[Segment, ...]:
    segments = await engine.generate(tokens_of(prompt), params, session)
    _well_formed(segments, params)
    return segments


async def _drawing(engine: RolloutEngine, tokens: int, case: RolloutCase) -> None:
    """Wait until the engine has drawn `tokens` more."""
    goal = (await engine.stats()).tokens + tokens
    while (await engine.stats()).tokens < goal:  # noqa: ASYNC110 (a port has no event)
        await asyncio.sleep(case.poll_s)


async def _limits_are_kept(engine: RolloutEngine, case: RolloutCase) -> None:
    for limit in (1, 2, case.length):
        params = SamplingParams(max_tokens=limit, ignore_eos=True, seed=limit)
        got = await _generate(engine, case.prompts[0], params)
        assert len(joined(got)) == limit, (
            f"ignore_eos draws exactly max_tokens={limit}, got {len(joined(got))}"
        )
        assert got[-1].stop is Stop.LENGTH, (
            f"stop of a response at its limit is LENGTH, not {got[-1].stop}"
        )
    for seed, prompt in enumerate(case.prompts):
        params = SamplingParams(max_tokens=8, seed=seed)
        got = await _generate(engine, prompt, params)
        assert got and got[-1].stop in (Stop.EOS, Stop.LENGTH), (
            f"stop is {got[-1].stop if got else None}"
        )
        if got[-1].stop is Stop.LENGTH:
            assert len(joined(got)) == 8, f"LENGTH after {len(joined(got))} of 8 tokens"


async def _seeds_repeat(engine: RolloutEngine, case: RolloutCase) -> None:
    results = []
    for seed in range(6):
        params = SamplingParams(max_tokens=12, ignore_eos=True, seed=seed)
        first, second = [joined(await _generate(engine, case.prompts[0], params)) for _ in range(2)]
        assert first == second, f"seed {seed} drew {first.tolist()} and then {second.tolist()}"
        results.append(first.tobytes())
    assert len(set(results)) > 1, "six seeds drew the same tokens: the seed has no effect"


async def _batch_does_not_matter(engine: RolloutEngine, case: RolloutCase) -> None:
    jobs = [
        (
            prompt,
            SamplingParams(
                max_tokens=6 + 5 * i,
                ignore_eos=True,
                seed=10 * i + j,
                temperature=0.0 if j == 2 else 1.0,
            ),
        )
        for i, prompt in enumerate(case.prompts)
        for j in range(3)
    ]
    alone = [joined(await _generate(engine, *job)) for job in jobs]
    together = await asyncio.gather(*(_generate(engine, *job) for job in reversed(jobs)))
    for (prompt, params), one, many in zip(jobs, alone, reversed(together), strict=True):
        assert one == joined(many), (
            f"prompt {prompt}, {params}: alone {one.tolist()}, in a batch {joined(many).tolist()}"
        )


async def _interrupt_returns_all(engine: RolloutEngine, case: RolloutCase) -> None:
    await engine.interrupt()  # without running requests, it returns at once
    params = SamplingParams(max_tokens=case.length, ignore_eos=True)
    count = min((await engine.stats()).slots, 14) + 2
    tasks = [
        asyncio.create_task(_generate(engine, case.prompts[i % len(case.prompts)], params))
        for i in range(count)
    ]
    uninterruptible = asyncio.create_task(
        _generate(
            engine,
            case.prompts[1],
            SamplingParams(max_tokens=case.length, ignore_eos=True, interruptible=False),
        )
    )
    await _drawing(engine, 2, case)
    await engine.interrupt()
    late = [t for t in tasks if not t.done()]
    assert not late, f"interrupt() returned while {len(late)} of {count} generate calls had not"
    results = [t.result() for t in tasks]
    stopped = [r for r in results if not r or r[-1].stop is Stop.INTERRUPTED]
    assert stopped, (
        f"nothing was interrupted: {case.length} tokens were drawn before interrupt(). "
        "Fix: a longer length"
    )
    for got in results:
        if got and got[-1].stop is not Stop.INTERRUPTED:
            assert len(joined(got)) == case.length, (
                f"stop {got[-1].stop} after {len(joined(got))} of {case.length} tokens"
            )
    got = await uninterruptible
    assert got[-1].stop is Stop.LENGTH, (
        f"a request with interruptible=False ended with {got[-1].stop}"
    )
    assert len(joined(got)) == case.length, (
        f"a request with interruptible=False drew {len(joined(got))} of {case.length}"
    )


async def _resume_goes_on(engine: RolloutEngine, case: RolloutCase) -> None:
    for temperature in (0.0, 1.0):
        prompt = case.prompts[0]
        params = SamplingParams(
            max_tokens=case.length, ignore_eos=True, temperature=temperature, seed=5
        )
        whole = joined(await _generate(engine, prompt, params))
        task = asyncio.create_task(_generate(engine, prompt, params))
        await _drawing(engine, 1, case)
        await engine.interrupt()
        first = await task
        assert first and first[-1].stop is Stop.INTERRUPTED, (
            "not interrupted before its end. Fix: a longer length, a shorter poll_s"
        )
        start = joined(first)
        rest_params = SamplingParams(
            max_tokens=case.length - len(start),
            ignore_eos=True,
            temperature=temperature,
            seed=5,
            offset=len(start),
        )
        rest = joined(await _generate(engine, [*prompt, *start], rest_params))
        assert len(start) + len(rest) == case.length, (
            f"{len(start)} + {len(rest)} tokens, not {case.length}"
        )
        if temperature == 0 or case.exact_resume:
            assert start + rest == whole, (
                f"temperature {temperature}, interrupted after {len(start)}: "
                f"{(start + rest).tolist()}, uninterrupted {whole.tolist()}"
            )


async def _sessions_continue(engine: RolloutEngine, case: RolloutCase) -> None:
    """Ask turns of several sessions at once. A new session gives the same second turns."""
    turns = min(case.length // 4, 12)

    async def talk(i: int, temperature: float) -> tuple[list[int], SamplingParams, Tokens]:
        prompt, session = [*case.prompts[i]], f"talk/{i}/{temperature}"
        for turn in range(3):
            params = SamplingParams(
                max_tokens=turns, ignore_eos=True, temperature=temperature, seed=100 * i + turn
            )
            drawn = joined(await engine.generate(tokens_of(prompt), params, session))
            asked, prompt = prompt, [*prompt, *drawn, *case.prompts[i - 1]]
        return asked, params, drawn

    talks = [talk(i, t) for i in range(len(case.prompts)) for t in (0.0, 1.0)]
    for i, (prompt, params, drawn) in enumerate(await asyncio.gather(*talks)):
        alone = joined(await engine.generate(tokens_of(prompt), params, f"new/{i}"))
        assert drawn == alone, (
            f"the third turn of a session, after {len(prompt)} tokens: {drawn.tolist()}. "
            f"The same turn in a new session: {alone.tolist()}"
        )


async def _stats_move(engine: RolloutEngine, case: RolloutCase) -> None:
    before = await engine.stats()
    assert before.slots >= 1, f"{before.slots} decode slots"
    await _generate(engine, case.prompts[0], SamplingParams(max_tokens=9, ignore_eos=True))
    after = await engine.stats()
    assert after.tokens - before.tokens == 9, (
        f"9 tokens were drawn, stats count {after.tokens - before.tokens}"
    )
    assert after.prefill_tokens > before.prefill_tokens, "prefill_tokens did not move"
    assert after.busy_slot_s > before.busy_slot_s, "busy_slot_s did not move"
    await asyncio.sleep(case.poll_s)
    assert (await engine.stats()).busy_slot_s == after.busy_slot_s, (
        "busy_slot_s grows while nothing runs"
    )


async def _cancel_frees_slots(engine: RolloutEngine, case: RolloutCase) -> None:
    params = SamplingParams(max_tokens=case.length, ignore_eos=True, interruptible=False)
    count = (await engine.stats()).slots + 2
    tasks = [asyncio.create_task(_generate(engine, case.prompts[0], params)) for _ in range(count)]
    await _drawing(engine, 1, case)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    drawn = (await engine.stats()).tokens
    await _generate(engine, case.prompts[0], SamplingParams(max_tokens=4, ignore_eos=True))
    extra = (await engine.stats()).tokens - drawn - 4
    # Each request may draw one more token while the cancellation arrives.
    assert extra <= count, f"{extra} tokens were drawn for cancelled requests"


async def _sleep_and_wake(engine: Replica, case: RolloutCase) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    before = joined(await _generate(engine, case.prompts[0], params))
    await engine.sleep()
    await engine.sleep()
    await engine.wake()
    after = joined(await _generate(engine, case.prompts[0], params))
    assert before == after, (
        f"greedy tokens {before.tolist()} before sleep, {after.tolist()} after wake"
    )


_ROLLOUT_CHECKS = (
    _limits_are_kept,
    _seeds_repeat,
    _batch_does_not_matter,
    _interrupt_returns_all,
    _resume_goes_on,
    _sessions_continue,
    _stats_move,
    _cancel_frees_slots,
)
