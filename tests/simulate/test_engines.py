"""Simulated rewards are random, but a pure function of prompt and response."""

from __future__ import annotations

from millrace.simulate import clock
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimReward
from millrace.types import Completion, Prompt, Score, tokens_of

TEXTS = [Completion(str(i)) for i in range(1000)]


def scores(index: int, **options: object) -> list[Score]:
    prompt = Prompt(index, tokens_of([1]), "", "d")
    return clock.run(SimReward(CostModel(), **options).score(prompt, TEXTS))  # type: ignore[arg-type]


def test_a_response_is_right_with_its_prompts_chance_every_time_it_is_scored() -> None:
    drawn = scores(3, chance=lambda prompt: prompt.index / 10)
    assert drawn == scores(3, chance=lambda prompt: prompt.index / 10)
    assert 0.25 < sum(s.value for s in drawn) / len(TEXTS) < 0.35
    assert drawn != scores(4, chance=lambda prompt: 0.3)


def test_a_chance_of_0_or_1_leaves_none_and_one_is_the_default() -> None:
    assert {s.value for s in scores(0, chance=lambda prompt: 0.0)} == {0.0}
    assert (
        {s.value for s in scores(0, chance=lambda prompt: 1.0)}
        == {s.value for s in scores(0)}
        == {1.0}
    )
