"""One trajectory: an environment and the policy take turns until one of them is done.

An interruption is invisible to the environment: the response goes on from the tokens it has, in the same random stream,
within the same limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

from millrace.ports import Environment
from millrace.types import Author, Prompt, SamplingParams, Segment, Stop, Tokens, Trajectory

Draw = Callable[[Tokens, SamplingParams, str], Awaitable[tuple[Segment, ...]]]
"""Draws tokens: a pool of rollout engines behind the gate that holds rollouts still."""


def request_seed(run_seed: int, sample_index: int, trajectory: int) -> int:
    """The seed of one trajectory's random stream: 63 bits that depend on these three numbers alone."""
    digest = hashlib.blake2b(
        f"{run_seed}/{sample_index}/{trajectory}".encode(), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big") >> 1


async def run_episode(
    draw: Draw,
    environment: Environment,
    prompt: Prompt,
    params: SamplingParams,
    session: str,
    *,
    so_far: Trajectory | None = None,
    on_progress: Callable[[Trajectory], None] | None = None,
) -> Trajectory:
    """The finished trajectory of `prompt`, continued from `so_far`.

    `params.max_tokens` bounds the whole response, environment turns included; a turn that does not fit ends it with
    Stop.LENGTH. `on_progress` sees each trajectory that an interruption leaves unfinished.
    """
    trajectory = so_far or Trajectory()
    try:
        context = await environment.open(prompt)
        while not trajectory.finished:
            used = trajectory.num_tokens
            segments = await draw(
                context + trajectory.tokens,
                replace(params, max_tokens=params.max_tokens - used, offset=used),
                session,
            )
            trajectory = trajectory.extend(segments)
            if not trajectory.finished:
                if on_progress is not None:
                    on_progress(trajectory)
                continue
            turn = await environment.reply(segments) if trajectory.stop is not Stop.LENGTH else None
            if turn is not None:
                trajectory = _add_turn(trajectory, turn.tokens, params.max_tokens)
        return trajectory
    finally:
        await environment.close()


def _add_turn(trajectory: Trajectory, tokens: Tokens, limit: int) -> Trajectory:
    *earlier, last = trajectory.segments
    if trajectory.num_tokens + len(tokens) >= limit:
        return Trajectory((*earlier, replace(last, stop=Stop.LENGTH)))
    return Trajectory((*earlier, replace(last, stop=None), Segment(tokens, Author.ENVIRONMENT)))
