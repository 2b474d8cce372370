"""Responses that are trained in windows: each sample draws one window, and the next continues it.

A sample of the next window has the prompt and the response so far as its prompt. So its tokens are
drawn, trained and counted like those of any other sample.
"""

from __future__ import annotations

from dataclasses import replace

from millrace.types import (
    Continuation,
    Floats,
    Prompt,
    Sample,
    Segment,
    Thread,
    Trajectory,
    floats_of,
)


def whole_response(prompt: Prompt, trajectory: Trajectory) -> tuple[Prompt, Trajectory]:
    """Return the prompt itself, and the whole response so far as one segment without log-probs."""
    before = prompt.continues
    if before is None:
        return prompt, trajectory
    tokens = prompt.response_before + trajectory.tokens
    segment = Segment(tokens, log_probs=floats_of([0.0] * len(tokens)), stop=trajectory.stop)
    own = replace(prompt, tokens=prompt.tokens[: before.prompt_tokens], continues=None)
    return own, replace(trajectory, threads=(Thread((segment,)),))


def next_prompt(sample: Sample, values: Floats) -> Prompt:
    """Return the prompt that continues the only response of a trained sample.

    `values` are those of its own window. The index is the sample's until a slot is given.
    """
    prompt, (trajectory,) = sample.prompt, sample.trajectories
    before = prompt.continues or Continuation(prompt.index, 0, len(prompt.tokens), floats_of())
    drawn = trajectory.tokens
    if len(values) != len(drawn):
        raise ValueError(f"{len(values)} values for the {len(drawn)} tokens of a window")
    after = replace(before, number=before.number + 1, values=before.values + values)
    return replace(prompt, tokens=prompt.tokens + drawn, continues=after)
