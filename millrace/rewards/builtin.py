"""Built-in reward functions, in verl's signature, by name.

A scorer returns 1 for a right answer and 0 for a wrong one. Some have other scores, which their
docstrings say.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

from millrace.errors import RewardError
from millrace.rewards.answers import extract, formula_text, formulas, required
from millrace.rewards.sources import refusal, scorer_of
from millrace.rewards.text_rewards import format_reward, repetition_penalty
from millrace.rewards.verl_scorers import gsm8k, gsm8k_flexible, math_dapo, math_reward

Result = float | dict[str, Any]
"""A score, or a dict with `score`, `pred` (the answer) and further components."""

_TUPLES = frozenset({"arc_agi", "rearc"})
"""Data sets whose scorers compare boards as tuples. JSON has no tuples."""


def default(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> Result:
    """Score a row by the scorer of its data source. This is the function if none is named.

    Raise RewardError if the source has none. The rows of files are checked before the run.
    """
    name = scorer_of(data_source, extra_info)
    if name is None:
        rule, fix = refusal(data_source, extra_info) or ("", "")
        raise RewardError("no_scorer", f"data_source {data_source!r}: {rule}. Fix: {fix}")
    return BUILTIN[name](data_source, solution_str, ground_truth, extra_info)


def exact(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """Return 1 if the completion equals the ground truth, or one of a list of ground truths.

    Space at both ends is ignored.
    """
    truth = required(data_source, ground_truth)
    accepted = truth if isinstance(truth, list) else [truth]
    return float(solution_str.strip() in [str(one).strip() for one in accepted])


def last_number(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Return 1 if the last number of the completion equals the ground truth, which is a number.

    Commas and a full stop after the number do not count. In GSM8K, the ground truth is the text
    after ####. The function reads no formulas: the answer "7 * 12" has the last number 12.
    """
    truth = number(required(data_source, ground_truth))
    if truth is None:
        rule = f"the ground truth {str(ground_truth)[:80]!r} is not a number"
        raise RewardError("bad_ground_truth", f"{rule}. Fix: reward.function=math")
    answer = extract(solution_str, "last_number")
    right = float(answer is not None and Decimal(answer) == truth)
    return {"score": right, "acc": right, "pred": answer}


def number(ground_truth: Any) -> Decimal | None:
    """Return the number that `last_number` compares with, or None if the ground truth is none."""
    try:
        found = Decimal(str(ground_truth).split("####")[-1].replace(",", "").strip())
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


def math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Return 1 if math-verify finds the completion's answer equal to the ground truth.

    In GSM8K, the ground truth is the text after ####. The answer is the first that exists of a
    formula after "final answer is", all boxes, and the last formula or number of the completion.
    Several boxes are one answer, the set of their contents: boxes of 1 and 2 do not equal 2.
    math-verify evaluates a formula. So a completion that repeats the question "What is 7 * 12?" is
    right, and `last_number` fits such questions.
    math-verify's own deadlines are off, because they need signals. The pool has a deadline that
    also stops code that ignores signals.
    """
    from math_verify import verify

    truth = required(data_source, ground_truth)
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = _gold(str(truth).split("####")[-1].strip())
    said = formulas(solution_str)
    right = float(verify(list(gold), said, timeout_seconds=None))
    return {"score": right, "acc": right, "pred": formula_text(said)}


@lru_cache(maxsize=1024)
def _gold(text: str) -> tuple[Any, ...]:
    forms = [text] if "\\boxed" in text or "$" in text else [f"\\boxed{{{text}}}", text]
    for form in forms:
        parsed = formulas(form)
        if parsed:
            return tuple(parsed)
    raise RewardError(
        "bad_ground_truth", f"math-verify finds no mathematics in the ground truth {text[:80]!r}"
    )


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> Result:
    """Return reasoning-gym's score for the completion's last <answer>, or for all of its text."""
    metadata = extra_info.get("metadata") or {}
    name = extra_info.get("reasoning_gym") or metadata.get("source_dataset") or data_source
    tagged = extract(solution_str, "tag")
    answer = solution_str.strip() if tagged is None else tagged
    entry = {
        "question": extra_info.get("question", ""),
        "answer": ground_truth,
        "metadata": _tupled(metadata) if name in _TUPLES else metadata,
    }
    score = float(_scorer(name)(answer, entry))
    return score if tagged is None else {"score": score, "pred": tagged}


@lru_cache
def _scorer(name: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym

    if name not in reasoning_gym.factory.DATASETS:
        raise RewardError(
            "no_scorer",
            f"reasoning-gym has no data set {name!r}: the row needs metadata.source_dataset",
        )
    scorer: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(name)
    return scorer


def _tupled(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tupled(v) for v in value)
    return {k: _tupled(v) for k, v in value.items()} if isinstance(value, dict) else value


BUILTIN: dict[str, Callable[..., Result]] = {
    "": default,
    "exact": exact,
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "last_number": last_number,
    "math": math,
    "math_dapo": math_dapo,
    "math_reward": math_reward,
    "reasoning_gym": reasoning_gym,
    "format": format_reward,
    "repetition_penalty": repetition_penalty,
}
"""The values of `reward.function` that are names. The last two take their options by name."""

NEEDS_TRUTH = frozenset(BUILTIN) - {"reasoning_gym", "format", "repetition_penalty"}
"""The functions that compare with a ground truth, which every row must have then."""
