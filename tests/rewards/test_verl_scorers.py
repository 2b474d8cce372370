"""verl's scorers, on vectors that are worked out by hand from their definitions."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.rewards.builtin import gsm8k, gsm8k_flexible, math_dapo, math_reward


def result(score: float, pred: str | None) -> dict[str, Any]:
    return {"score": score, "acc": float(score > 0), "pred": pred}


@pytest.mark.parametrize(
    ("text", "truth", "strict", "flexible"),
    [
        ("#### 72", "72", (1, "72"), (1, "72")),
        ("#### 1,234", "1234", (1, "1234"), (0, "1,234")),
        ("#### 71 no #### 72", "72", (1, "72"), (1, "72")),
        ("#### 72.", "72", (0, "72."), (0, "72.")),
        ("72", "72", (0, None), (1, "72")),
        ("it is 72 .", "72", (0, None), (1, "72")),
        ("####72", "72", (0, None), (1, "72")),
        ("#### $72", "72", (0, None), (1, "72")),
        ("#### -3", "-3", (1, "-3"), (1, "-3")),
        ("none", "72", (0, None), (0, None)),
        ("#### 72" + "x" * 300, "72", (0, None), (0, None)),
        ("#### 72", 72, (1, "72"), (1, "72")),
        ("#### 1234", "so 1,000 + 234.\n#### 1,234", (1, "1234"), (1, "1234")),
    ],
)
def test_gsm8k_strict_and_flexible(text: str, truth: Any, strict: Any, flexible: Any) -> None:
    assert gsm8k("openai/gsm8k", text, truth, {}) == result(*strict)
    assert gsm8k_flexible("openai/gsm8k", text, truth, {}) == result(*flexible)


@pytest.mark.parametrize(
    ("text", "truth", "score", "pred"),
    [
        ("so \\boxed{\\frac12}", "\\frac{1}{2}", 1, "\\frac{1}{2}"),
        ("\\boxed{0.5}", "1/2", 1, "\\frac{1}{2}"),
        ("\\boxed{0.50}", "1/2", 0, "0.50"),
        ("\\boxed{1}, no: \\boxed{2}", "2", 1, "2"),
        ("$\\boxed 7$", "7", 1, "7"),
        ("7", "7", 0, None),
        ("\\fbox{7}", "7", 0, None),
        ("\\boxed{7", "7", 0, None),
        ("\\boxed{\\sqrt}", "\\sqrt", 1, "\\sqrt"),
        ("\\boxed{\\sqrt}", "2", 0, "\\sqrt"),
        ("\\boxed{x = 5}", "We find $x$: \\boxed{5}.", 1, "5"),
    ],
)
def test_math_compares_boxes(text: str, truth: str, score: int, pred: Any) -> None:
    assert math_reward("lighteval/MATH", text, truth, {}) == result(score, pred)


@pytest.mark.parametrize(
    ("text", "truth", "score", "pred"),
    [
        ("Answer: 34", "34", 1, "34"),
        ("Answer: $34$", 34, 1, "34"),
        ("answer :1,234 dollars", "1234", 1, "1234"),
        ("Answer: 33\nAnswer: 34", "34", 1, "34"),
        ("Answer: 33 \\boxed{34}", "34", -1, "3334"),  # the line counts, not the box
        ("so \\boxed{34}", "34", 1, "34"),
        ("so \\boxed{ 34}", "34", -1, " 34"),  # a box is compared as it is written
        ("\\boxed{34}" + "x" * 91, "34", -1, None),
        ("34", "34", -1, None),
        ("Answer: 34" + "x\n" * 150, "34", -1, None),
        ("Answer: 34\n" + "x" * 289, "34", 1, "34"),  # 300 characters in all
        ("Answer: 34\n" + "x" * 290, "34", -1, None),  # the A is the 301st from the end
        ("", "34", -1, None),
    ],
)
def test_math_dapo_scores_1_or_minus_1(text: str, truth: Any, score: int, pred: Any) -> None:
    assert math_dapo("math_dapo", text, truth, {}) == result(score, pred)
