"""Demonstrations with several turns: an agent plays them with a script in place of the policy.

The tokens are therefore those of a rollout, whatever the agent, its tools and the template do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from millrace.errors import DataError, bad_row
from millrace.ports import Agent
from millrace.rollout.session import Limits, Session
from millrace.types import (
    Prompt,
    SamplingParams,
    Segment,
    Stop,
    Tokens,
    floats_of,
    joined,
    tokens_of,
)

_ROOM = 2**30


async def demonstration(
    agent: Agent,
    prompt: Prompt,
    script: Sequence[str],
    encode: Callable[[str], Sequence[int]],
    eos: Tokens,
) -> tuple[Tokens, ...]:
    """Return (prompt, response, context, response, ...) for `sft_step`.

    `script` has the policy's turns as text. Each ends with `eos`. Raises DataError if the agent
    does not use every turn of the script in one thread.
    """
    name, parts, told = f"demonstration {prompt.index}", list[Tokens](), asyncio.Event()

    def refused(rule: str, fix: str) -> DataError:
        return bad_row(name, list(script), rule, fix)

    async def draw(whole: Tokens, params: SamplingParams, session: str) -> tuple[Segment, ...]:
        known = joined(parts)
        if whole[: len(known)] != known:
            raise refused("its agent opens a second thread", "an agent of one thread")
        tokens = tokens_of(encode(script[len(parts) // 2])) + eos
        parts.extend((whole[len(known) :], tokens))
        if len(parts) == 2 * len(script):  # A score, for example, is no part of an example.
            told.set()
            await asyncio.Event().wait()  # until the agent is cancelled
        log_probs = floats_of([0.0] * len(tokens))
        return (Segment(tokens, version=0, log_probs=log_probs, stop=Stop.EOS),)

    limits = Limits(max_turns=len(script))
    session = Session(draw, prompt, SamplingParams(max_tokens=_ROOM), name, limits)
    play = asyncio.ensure_future(agent.play(session))
    end = asyncio.ensure_future(told.wait())
    try:
        await asyncio.wait({play, end}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        play.cancel()
        end.cancel()
        await asyncio.wait({play, end})
    if not play.cancelled() and (error := play.exception()) is not None:
        raise error
    if not told.is_set():
        rule = f"the episode ended after {len(parts) // 2} of its {len(script)} turns"
        raise refused(rule, "turns that the environment answers")
    return tuple(parts)
