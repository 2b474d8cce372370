"""verl's scorers for its data sources: GSM8K, MATH, and DAPO's mathematics with AIME.

Each returns `score`, `acc` (1 if the answer is right, else 0) and `pred` (the answer). They follow
the definitions in verl's folder `utils/reward_score`.

| scorer | right | wrong | answer |
|---|--:|--:|---|
| gsm8k | 1 | 0 | the number after `####` |
| gsm8k_flexible | 1 | 0 | the last number |
| math_reward | 1 | 0 | the last box, in MATH's normal form |
| math_dapo | 1 | -1 | the `Answer:` line in Minerva's normal form, or the last box |

A ground truth is the answer alone. GSM8K's and MATH's may also be the whole solution of the data
set, whose answer is found in the same way.
"""

from __future__ import annotations

from typing import Any

from millrace.rewards.answers import Form, extract, required
from millrace.rewards.normalise import hendrycks, minerva


def gsm8k(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Score GSM8K strictly: the number after the last `#### ` must equal the ground truth.

    Commas in the answer do not count. Only the last 300 characters are read.
    """
    return _gsm8k(extract(solution_str, "hashes"), required(data_source, ground_truth))


def gsm8k_flexible(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Score GSM8K flexibly: the last number must equal the ground truth as it is written.

    A comma or a full stop directly after the number is part of it, as in verl.
    """
    return _gsm8k(extract(solution_str, "number"), required(data_source, ground_truth))


def _gsm8k(answer: str | None, ground_truth: Any) -> dict[str, Any]:
    truth = _solution(ground_truth, "####", "hashes")
    return _scored(answer is not None and answer == truth, answer, wrong=0.0)


def math_reward(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Score MATH: the last box and the ground truth must have the same normal form.

    If one of them breaks off in the middle of a formula, both are compared as they are written.
    """
    truth = _solution(required(data_source, ground_truth), "\\boxed", "boxed")
    answer = extract(solution_str, "boxed")
    if answer is None:
        return _scored(False, None, wrong=0.0)
    try:
        answer, truth = hendrycks(answer), hendrycks(truth)
    except ValueError:
        return _scored(answer == truth, answer, wrong=0.0)
    return _scored(answer == truth, answer, wrong=0.0)


def math_dapo(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Score DAPO's mathematics and AIME: 1 if the answer is right, else -1.

    The `Answer:` line of the last 300 characters counts, in Minerva's normal form. Without one, the
    last box of the last 100 characters must equal the ground truth as it is written.
    """
    truth = str(required(data_source, ground_truth))
    answer = extract(solution_str, "answer_line")
    if answer is not None:
        return _scored(answer == minerva(truth), answer, wrong=-1.0)
    answer = extract(solution_str, "boxed_end")
    return _scored(answer == truth, answer, wrong=-1.0)


def _solution(ground_truth: Any, mark: str, form: Form) -> str:
    """Return the answer of a ground truth, which may be a whole solution with a mark."""
    truth = str(ground_truth)
    answer = extract(truth, form) if mark in truth else None
    return truth if answer is None else answer


def _scored(right: bool, answer: str | None, *, wrong: float) -> dict[str, Any]:
    return {"score": 1.0 if right else wrong, "acc": float(right), "pred": answer}
