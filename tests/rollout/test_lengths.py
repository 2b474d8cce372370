"""Drawn lengths.

They depend on the seed alone, stay within their bounds, and follow their distribution.
"""

from __future__ import annotations

import asyncio
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.rollout.episode import SingleTurn
from millrace.rollout.lengths import DrawnLengths
from millrace.rollout.sample import SampleRoller
from millrace.types import Prompt, SamplingParams, Score, Segment, Stop, floats_of, tokens_of


@given(st.floats(1, 1e4), st.floats(0, 3), st.integers(1, 20_000), st.integers(0, 2**63 - 1))
def test_a_length_is_within_its_bounds_and_depends_on_the_seed_alone(
    median: float, sigma: float, limit: int, seed: int
) -> None:
    lengths = DrawnLengths(median, sigma, limit)
    assert 1 <= lengths.of(seed) <= limit
    assert lengths.of(seed) == DrawnLengths(median, sigma, limit).of(seed)


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.2])
def test_they_are_log_normal(sigma: float) -> None:
    logs = [math.log(DrawnLengths(1000, sigma, 10**9).of(seed)) for seed in range(4000)]
    assert statistics.median(logs) == pytest.approx(math.log(1000), abs=0.05)
    assert statistics.stdev(logs) == pytest.approx(sigma, abs=0.05)


def test_every_trajectory_of_a_sample_ends_at_its_own_length() -> None:
    asked: list[SamplingParams] = []

    class Zero:
        async def score(self, prompt: Prompt, completions: object) -> list[Score]:
            return [Score(0.0)]

        async def close(self) -> None: ...

    async def draw(tokens: object, params: SamplingParams, session: str) -> tuple[Segment, ...]:
        asked.append(params)
        count = params.max_tokens
        return (
            Segment(
                tokens_of([5] * count),
                version=0,
                log_probs=floats_of([-1.0] * count),
                stop=Stop.LENGTH,
            ),
        )

    lengths = DrawnLengths(20, 1.0, 64)
    roller = SampleRoller(
        SingleTurn(), Zero(), str, SamplingParams(64), n=8, seed=3, lengths=lengths
    )
    sample = asyncio.run(roller.roll(draw, Prompt(0, tokens_of([1]), "", "x"), 0))
    found = [t.num_tokens for t in sample.trajectories]
    assert found == [lengths.of(p.seed) for p in asked] and len(set(found)) > 3
    assert all(p.ignore_eos for p in asked)
