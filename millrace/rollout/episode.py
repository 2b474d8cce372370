"""One trajectory: an environment and the policy take turns until one of them ends it.

The environment does not see an interruption. The response continues from its tokens so far, in the
same random stream and within the same limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

from millrace.ports import Environment
from millrace.types import Author, Prompt, SamplingParams, Segment, Stop, Tokens, Trajectory

Draw = Callable[[Tokens, SamplingParams, str], Awaitable[tuple[Segment, ...]]]
"""A call that draws tokens from the pool of rollout engines. It waits while rollouts are paused."""


def request_seed(run_seed: int, sample_index: int, trajectory: int) -> int:
    """Return the seed of one trajectory: 63 bits that depend only on these three numbers."""
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
    """Return the finished trajectory of `prompt`, continued from `so_far`.

    `params.max_tokens` bounds the whole response, including environment turns. A turn that does not
    fit ends it with Stop.LENGTH. `on_progress` gets each trajectory that an interruption leaves
    unfinished.
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
