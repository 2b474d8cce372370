"""Built-in scorers, on the answers that matter to runs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from millrace.data.rows import problem
from millrace.data.sources import load_source
from millrace.errors import RewardError
from millrace.rewards.builtin import (
    BUILTIN,
    NEEDS_TRUTH,
    default,
    exact,
    last_number,
    math,
    reasoning_gym,
)
from millrace.rewards.functions import to_score
from millrace.types import Score


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


@pytest.mark.parametrize("name", sorted(NEEDS_TRUTH - {""}))
def test_a_row_without_a_ground_truth_is_an_error_of_its_scorer(name: str) -> None:
    for text in ("None", "#### None", "\\boxed{None}", "Answer: None"):
        with pytest.raises(RewardError, match="a row of d has no ground truth"):
            BUILTIN[name]("d", text, None, {})


@pytest.mark.parametrize(
    ("text", "truth", "score", "pred"),
    [
        ("7 * 12 = 84.", "84", 1, "84"),
        ("It is 1,234!", "1234", 1, "1234"),
        ("$84.00", "1,200 less is\n#### 84", 1, "84.00"),
        ("from 90-84", "84", 1, "84"),
        ("-84", "84", 0, "-84"),
        ("It is 84, not 48.", "84", 0, "48"),
        ("What is 7 * 12?", "84", 0, "12"),
        ("7 * 12", "84", 0, "12"),
        ("eighty-four", "84", 0, None),
        ("", "84", 0, None),
        ("84" + " and so on" * 100, 84, 1, "84"),
    ],
)
def test_the_last_number_is_read_and_no_formula(
    text: str, truth: Any, score: int, pred: str | None
) -> None:
    expected = {"score": score, "acc": score, "pred": pred}
    assert last_number("d", text, truth, {}) == expected


@pytest.mark.parametrize("text", ["4", "no number"])
@pytest.mark.parametrize("truth", ["x^2", "nan", "Infinity", "", "50%"])
def test_the_last_number_needs_a_number(truth: str, text: str) -> None:
    rule = re.escape(f"{truth!r} is not a number. Fix: reward.function=math")
    with pytest.raises(RewardError, match=rule):
        last_number("d", text, truth, {})


def test_an_answer_that_repeats_the_question_is_wrong() -> None:
    for name in ("products", "sums"):
        rows = load_source(f"task:{name}?smaller=99&larger=99&size=2000", seed=0)
        for i in range(2000):
            row = problem(rows, i)
            assert to_score(default(name, row.text, row.ground_truth, {})).value == 0, row.text


def test_each_data_source_has_its_own_scorer() -> None:
    def scored(source: str, text: str) -> Score:
        return to_score(default(source, text, "1,234", {}))

    texts = ("1,234", "#### 1234", "\\boxed{1,234}", "Answer: 1234")
    table = {
        source: [scored(source, text).value for text in texts]
        for source in ("sort_digits", "openai/gsm8k", "lighteval/MATH", "aime24", "numina_cn_k12")
    }
    assert table == {
        "sort_digits": [1, 0, 0, 0],
        "openai/gsm8k": [0, 0, 0, 0],  # verl's data has no comma in a ground truth
        "lighteval/MATH": [0, 0, 1, 0],
        "aime24": [-1, -1, 1, 1],
        "numina_cn_k12": [1, 1, 1, 1],
    }
    assert scored("aime24", "Answer: 7").extra == {"acc": 0.0}


def test_a_row_of_an_unknown_source_is_an_error_and_never_an_exact_match() -> None:
    with pytest.raises(RewardError, match=r"no_scorer: data_source 'mine': .*Fix: "):
        default("mine", "4", "4", {})


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
    assert math("d", said, truth, {})["score"] == score


def test_math_compares_words_as_words_and_refuses_an_empty_ground_truth() -> None:
    assert math("d", "\\boxed{Tuesday}", "Tuesday", {})["score"] == 1
    with pytest.raises(RewardError, match="bad_ground_truth"):
        math("d", "1", "  ", {})


@pytest.mark.parametrize(
    "name", ["chain_sum", "knights_knaves", "spell_backward", "arc_agi", "number_sorting"]
)
def test_reasoning_gym_rows_are_scored_by_their_own_scorer(name: str) -> None:
    shown = problem(load_source(f"reasoning_gym:{name}?size=3", seed=0), 1)
    right, wrong, bare = (
        to_score(default(shown.data_source, text, shown.ground_truth, shown.extra_info))
        for text in (
            f"I think <answer> {shown.answer} </answer>",
            "<answer>nothing</answer>",
            shown.answer,
        )
    )
    assert right == Score(1.0, answer=shown.answer.strip())
    assert wrong.value < 1 and wrong.answer == "nothing"
    assert bare == Score(1.0)  # without a tag, the whole response is the answer


def test_reasoning_gym_rows_of_a_file_name_their_data_set() -> None:
    row = {"metadata": {"source_dataset": "chain_sum"}}
    assert reasoning_gym("file", "4", "4", row) == 1
    assert default("file", " 4", "4", row) == 1
    assert default("file", "<answer>4</answer>", "4", row) == {"score": 1.0, "pred": "4"}
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
    assert math("d", said, truth, {})["score"] == score


def test_math_says_which_answer_it_compared() -> None:
    found = math("d", "2 and 3, so the final answer is $\\frac{1}{2}$", "0.5", {})
    assert found == {"score": 1.0, "acc": 1.0, "pred": "\\frac{1}{2}"}
    assert math("d", "I do not know", "72", {})["pred"] is None
