"""Reward shaping: penalties on a trajectory's score, in training only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from millrace.types import Score, Trajectory


@dataclass(frozen=True, slots=True)
class OverlongBuffer:
    """DAPO's soft penalty on long responses, over the last `buffer` tokens before `max_length`."""

    max_length: int
    buffer: int
    factor: float

    def shape(self, score: Score, trajectory: Trajectory) -> Score:
        """Return `score` plus the penalty, which is the component `overlong_reward`.

        Only the policy's own tokens count.
        """
        length = trajectory.num_policy_tokens
        penalty = overlong_penalty(
            length, max_length=self.max_length, buffer=self.buffer, factor=self.factor
        )
        return replace(
            score,
            value=score.value + penalty,
            extra=score.extra | {"overlong_reward": penalty},
            raw=score.unshaped,
        )


def overlong_penalty(length: int, *, max_length: int, buffer: int, factor: float) -> float:
    """Return the penalty on the reward of a long response: DAPO's soft overlong punishment.

    (arXiv 2503.14476, section 3.4.) With E = max_length - buffer:

    length           penalty
    up to E          0
    E to max_length  -factor (length - E) / buffer
    over max_length  -factor

    `length` counts the policy's own tokens in all its turns, without the tokens of an environment
    or a tool. (verl counts both, and its penalty grows past -factor.)

    Raises ValueError unless 0 < buffer <= max_length, factor >= 0 and length >= 0.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"buffer must be over 0 and at most max_length, {max_length}: got {buffer}"
        )
    if not factor >= 0:
        raise ValueError(f"factor must be at least 0, got {factor}")
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}")
    excess = min(max(length - (max_length - buffer), 0), buffer)
    return -factor * (excess / buffer) if excess else 0.0
