"""A reward that is asked again, on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import RewardError
from millrace.rollout.retry import RetryingReward, pause_s
from millrace.simulate import clock
from millrace.types import Completion, Prompt, Score, tokens_of


class Failing:
    """A reward whose first calls fail."""

    def __init__(self, failures: int) -> None:
        self.failures, self.calls = failures, 0

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        self.calls += 1
        if self.calls <= self.failures:
            raise RewardError("http_503", f"call {self.calls}")
        return [Score(1.0)]

    async def close(self) -> None:
        return None


async def asked(reward: Failing, retries: int) -> tuple[list[Score], float]:
    start = asyncio.get_running_loop().time()
    prompt = Prompt(7, tokens_of([1]), "p", "d")
    scores = await RetryingReward(reward, retries).score(prompt, [Completion("x")])
    return scores, asyncio.get_running_loop().time() - start


def test_a_score_is_asked_for_again_after_a_growing_pause() -> None:
    scores, seconds = clock.run(asked(Failing(3), 3))
    name = "the score of prompt 7"
    assert scores == [Score(1.0)]
    assert seconds == pytest.approx(sum(pause_s(name, failed) for failed in range(3)))


@pytest.mark.parametrize("retries", [0, 2])
def test_the_last_failure_is_the_error(retries: int) -> None:
    reward = Failing(9)
    with pytest.raises(RewardError, match=f"http_503: call {retries + 1}"):
        clock.run(asked(reward, retries))
    assert reward.calls == retries + 1


@given(st.text(), st.integers(0, 10_000))
def test_pauses_double_up_to_a_limit_and_differ_by_name(name: str, failed: int) -> None:
    middle = min(30.0, 0.25 * 2.0 ** min(failed, 20))
    assert middle / 2 <= pause_s(name, failed) <= 1.5 * middle
    assert pause_s(name, failed) != pause_s(f"{name}!", failed)
