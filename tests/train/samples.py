"""Ragged random samples for the tests of training.

Some trajectories have several turns, end with the environment, or have no token of the policy.
"""

from __future__ import annotations

import random
from typing import Any

from millrace.types import (
    Author,
    Prompt,
    Sample,
    Score,
    Segment,
    Stop,
    Trajectory,
    floats_of,
    tokens_of,
)

VOCAB = 13


def random_sample(rng: random.Random, index: int, n: int, longest: int = 9) -> Sample:
    def ids(count: Any) -> Any:
        return tokens_of(rng.randrange(VOCAB) for _ in range(count))

    def turn(count: Any, version: Any) -> Segment:
        drawn = floats_of(-rng.uniform(1.5, 3.5) for _ in range(count))
        return Segment(ids(count), version=version, log_probs=drawn, stop=Stop.EOS)

    def trajectory() -> Trajectory:
        segments = [turn(rng.randint(1, longest), rng.randint(0, 1))]
        kind = rng.random()
        if kind < 0.3:  # another turn
            segments += [
                Segment(ids(rng.randint(1, 4)), Author.ENVIRONMENT),
                turn(rng.randint(1, 4), 2),
            ]
        elif kind < 0.4:  # the environment writes the last segment
            segments.append(Segment(ids(3), Author.ENVIRONMENT))
        elif kind < 0.5:  # no token of the policy
            segments = [Segment(ids(2), Author.ENVIRONMENT)] if rng.random() < 0.5 else []
        return Trajectory.of(tuple(segments), Score(float(rng.choice([0, 0, 1, 0.3]))))

    return Sample(
        Prompt(index, ids(rng.randint(1, 5)), "", "test"), tuple(trajectory() for _ in range(n))
    )


def random_samples(seed: int, counts: list[int], longest: int = 9) -> tuple[Sample, ...]:
    """Return one sample for each number of trajectories in `counts`."""
    rng = random.Random(seed)
    return tuple(random_sample(rng, i, n, longest) for i, n in enumerate(counts))
