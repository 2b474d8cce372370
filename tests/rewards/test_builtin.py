"""Built-in scorers, on the answers that matter to runs."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.data.rows import problem
from millrace.data.sources import load_source
from millrace.errors import RewardError
from millrace.rewards.builtin import default, exact, math, reasoning_gym


def test_exact_ignores_space_around_the_answer_alone() -> None:
    assert [exact("d", text, "12 3", {}) for text in (" 12 3\n", "12 3", "123", "", "12 3.")] == [
        1,
        1,
        0,
        0,
        0,
    ]
    assert exact("d", "b", ["a", "b"], {}) == 1
    assert exact("d", "4", 4, {}) == 1
    for scorer in (exact, math):
        with pytest.raises(RewardError, match="no ground truth"):
            scorer("d", "None", None, {})


@pytest.mark.parametrize(
    ("said", "truth", "score"),
    [
        ("The answer is \\boxed{0.5}", "\\frac{1}{2}", 1),
        ("so \\boxed{1/2}.", "$\\frac{1}{2}$", 1),
        ("72", "Natalia sold 48/2 = 24.\n#### 72", 1),
        ("\\boxed{71}", "#### 72", 0),
        ("I do not know", "72", 0),
        ("\\boxed{x^2+1}", "1 + x^2", 1),
        ("\\boxed{1,234}", "1234", 1),
    ],
)
def test_math_compares_values(said: Any, truth: Any, score: Any) -> None:
    assert math("d", said, truth, {}) == score


def test_math_compares_words_as_words_and_refuses_an_empty_ground_truth() -> None:
    assert math("d", "\\boxed{Tuesday}", "Tuesday", {}) == 1
    with pytest.raises(RewardError, match="bad_ground_truth"):
        math("d", "1", "  ", {})


@pytest.mark.parametrize(
    "name", ["chain_sum", "knights_knaves", "spell_backward", "arc_agi", "number_sorting"]
)
def test_reasoning_gym_rows_are_scored_by_their_own_scorer(name: str) -> None:
    shown = problem(load_source(f"reasoning_gym:{name}?size=3", seed=0), 1)
    right, wrong = (
        default(shown.data_source, text, shown.ground_truth, shown.extra_info)
        for text in (f"I think <answer> {shown.answer} </answer>", "<answer>nothing</answer>")
    )
    assert right == 1
    assert wrong < 1


def test_reasoning_gym_rows_of_a_file_name_their_data_set() -> None:
    row = {"metadata": {"source_dataset": "chain_sum"}}
    assert reasoning_gym("file", "4", "4", row) == 1
    assert default("file", " 4", "4", row) == 1
    with pytest.raises(RewardError, match="source_dataset"):
        reasoning_gym("file", "4", "4", {})


@pytest.mark.parametrize(
    ("said", "truth", "score"),
    [
        ("\\boxed{1}, no: \\boxed{2}", "2", 0),
        ("\\boxed{1}, no: \\boxed{2}", "\\boxed{1, 2}", 1),
        ("\\boxed{2}, and the answer is 3", "2", 1),
        ("\\boxed{7}. So the final answer is $8$.", "8", 1),
        ("I think 4. No, 5", "5", 1),
    ],
)
def test_math_takes_all_boxes_as_one_answer(said: Any, truth: Any, score: Any) -> None:
    assert math("d", said, truth, {}) == score
