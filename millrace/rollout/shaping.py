"""Reward shaping: what is added to a trajectory's score the moment it is known, in training alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from millrace.algorithms.shaping import overlong_penalty
from millrace.types import Score, Trajectory


@dataclass(frozen=True, slots=True)
class OverlongBuffer:
    """DAPO's soft punishment of long responses, over the last `buffer` tokens before `max_length`."""

    max_length: int
    buffer: int
    factor: float

    def shape(self, score: Score, trajectory: Trajectory) -> Score:
        """`score` with the penalty added, and named `overlong_reward`. The policy's own tokens are what counts."""
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
