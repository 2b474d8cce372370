"""Rewards for the form of a response, against counts by hand and in other words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.config import RewardConfig
from millrace.rewards.builtin import format_reward, repetition_penalty


def penalty(text: str, ngram_size: int, max_penalty: float = -1.0) -> float:
    return repetition_penalty("d", text, None, {}, ngram_size=ngram_size, max_penalty=max_penalty)


@pytest.mark.parametrize(
    ("text", "ngram_size", "expected"),
    [
        ("a b c d", 2, 0.0),
        ("a b A b", 2, -1 / 3),  # ab, ba, ab: 2 of 3 are distinct
        ("a a a a a", 1, -4 / 5),
        ("a a a a a", 5, 0.0),
        ("a a", 3, 0.0),
        ("", 1, 0.0),
    ],
)
def test_the_penalty_is_the_share_of_repeated_ngrams(
    text: str, ngram_size: int, expected: float
) -> None:
    assert penalty(text, ngram_size) == pytest.approx(expected)
    assert penalty(text, ngram_size, -0.5) == pytest.approx(expected / 2)


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 5))
def test_the_penalty_is_that_of_a_loop_over_positions(words: list[str], size: int) -> None:
    seen: list[list[str]] = []
    repeated = 0
    for at in range(len(words) - size + 1):
        ngram = words[at : at + size]
        repeated += ngram in seen
        seen.append(ngram)
    expected = -repeated / len(seen) if seen else 0.0
    assert penalty(" ".join(words), size) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>2 + 2\nis 4</think>\n<answer>4</answer>", 1),
        ("<think></think><answer></answer>\n", 1),
        ("<answer>4</answer>", 0),
        ("so <think>a</think><answer>4</answer>", 0),
        ("<think>a</think><answer>4</answer> done", 0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0),
        ("<think>a</think></think><answer>4</answer>", 0),
    ],
)
def test_the_default_format_is_one_thought_and_one_answer(text: str, score: int) -> None:
    pattern = RewardConfig().format.pattern
    assert format_reward("d", text, None, {}, pattern=pattern) == score
