"""Reward shaping: penalties on a trajectory's score, in training only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from millrace.algorithms.shaping import overlong_penalty
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
