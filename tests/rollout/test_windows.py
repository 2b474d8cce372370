"""Samples that draw one window of a response: where it ends, what is scored, what goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from millrace.rollout.episode import SingleTurn
from millrace.rollout.lengths import DrawnLengths
from millrace.rollout.sample import SampleRoller
from millrace.rollout.shaping import OverlongBuffer
from millrace.schedule.continuation import next_prompt
from millrace.types import (
    Completion,
    Prompt,
    Sample,
    SamplingParams,
    Score,
    Segment,
    Stop,
    Tokens,
    floats_of,
    tokens_of,
)

PROMPT = Prompt(3, tokens_of([7, 8]), "p", "d", ground_truth="g")


@dataclass
class Counting:
    """An engine that counts on from the last token, and a reward that notes what it scores."""

    end: int = 99
    """The token that ends a response."""
    most: int = 99
    """The most tokens that a request draws before it is interrupted."""
    asked: list[SamplingParams] = field(default_factory=list)
    seen: list[tuple[Prompt, Completion]] = field(default_factory=list)

    async def draw(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        self.asked.append(params)
        first, count = tokens[-1] + 1, min(params.max_tokens, self.most)
        drawn = [t for t in range(first, first + count) if t <= self.end]
        stop = Stop.LENGTH if len(drawn) == params.max_tokens else Stop.INTERRUPTED
        stop = Stop.EOS if drawn[-1] == self.end else stop
        one = Segment(tokens_of(drawn), version=0, log_probs=floats_of([-1.0] * len(drawn)))
        return (replace(one, stop=stop),)

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        self.seen += [(prompt, one) for one in completions]
        return [Score(1.0) for _ in completions]

    async def close(self) -> None:
        return None

    def windows(self, **options: Any) -> list[Sample]:
        """Return the samples of a whole response, one for each window."""
        params = SamplingParams(options.pop("most", 10), ignore_eos=False)
        roller = SampleRoller(
            SingleTurn(), self, lambda t: str([*t]), params, 1, seed=0, **{"window": 3} | options
        )
        samples, prompt = list[Sample](), PROMPT
        while not samples or samples[-1].goes_on:
            if samples:
                values = floats_of(float(t) for t in samples[-1].trajectories[0].tokens)
                prompt = replace(next_prompt(samples[-1], values), index=3 + len(samples))
            samples.append(asyncio.run(roller.roll(self.draw, prompt, 0)))
        return samples


def drawn(samples: list[Sample]) -> list[list[int]]:
    return [s.trajectories[0].tokens.tolist() for s in samples]


@pytest.mark.parametrize("whole_group", [False, True])
def test_the_reward_reads_the_whole_response_once_at_its_end(whole_group: bool) -> None:
    engine = Counting(end=16)
    samples = engine.windows(whole_group=whole_group)
    assert drawn(samples) == [[9, 10, 11], [12, 13, 14], [15, 16]]
    assert [s.trajectories[0].score for s in samples] == [None, None, Score(1.0)]
    assert [s.trajectories[0].stop for s in samples] == [Stop.INTERRUPTED] * 2 + [Stop.EOS]
    ((prompt, completion),) = engine.seen
    assert completion.text == str([*range(9, 17)]) and completion.tokens.tolist() == [*range(9, 17)]
    assert prompt.tokens == PROMPT.tokens and prompt.ground_truth == "g"
    last = samples[-1].prompt
    assert last.continues is not None and (last.first, last.in_stream) == (3, 3 + 2)
    assert last.continues.values.tolist() == [9.0, 10.0, 11.0, 12.0, 13.0, 14.0]


def test_a_response_that_ends_with_its_window_does_not_go_on() -> None:
    assert drawn(Counting(end=11).windows()) == [[9, 10, 11]]
    samples = Counting(end=14).windows()
    assert drawn(samples) == [[9, 10, 11], [12, 13, 14]]
    assert not samples[-1].goes_on


@pytest.mark.parametrize("most", [6, 7])
def test_the_length_limit_of_the_response_ends_it_in_its_last_window(most: int) -> None:
    engine = Counting()
    samples = engine.windows(most=most)
    assert sum(map(len, drawn(samples))) == most
    assert samples[-1].trajectories[0].stop is Stop.LENGTH and len(engine.seen) == 1


def test_drawn_lengths_are_those_of_the_whole_response() -> None:
    lengths = DrawnLengths(median=6, sigma=0.5, limit=40)
    whole = Counting(end=99).windows(lengths=lengths, window=0)
    windows = Counting(end=99).windows(lengths=lengths, window=2)
    assert len(windows) > 1 and [t for one in drawn(windows) for t in one] == drawn(whole)[0]


def test_an_interrupted_window_continues_up_to_its_end() -> None:
    engine = Counting(end=14, most=2)
    assert drawn(engine.windows()) == [[9, 10, 11], [12, 13, 14]]
    assert [(p.offset, p.max_tokens) for p in engine.asked] == [(0, 3), (2, 1), (0, 3), (2, 1)]


def test_a_penalty_for_long_responses_counts_all_windows() -> None:
    samples = Counting(end=16).windows(overlong=OverlongBuffer(10, 4, 1.0))
    score = samples[-1].trajectories[0].score
    assert score is not None and score.value == 1.0 - 2 / 4
