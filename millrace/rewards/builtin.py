"""Built-in reward functions, in verl's signature, by name in BUILTIN.

A scorer returns 1 for a right answer and 0 for a wrong one. Some have other scores, which their
docstrings say. verl's own scorers follow the definitions in its folder `utils/reward_score`:

| scorer | right | wrong | answer |
|---|--:|--:|---|
| gsm8k | 1 | 0 | the number after `####` |
| gsm8k_flexible | 1 | 0 | the last number |
| math_reward | 1 | 0 | the last box, in MATH's normal form |
| math_dapo | 1 | -1 | the `Answer:` line in Minerva's normal form, or the last box |

They return `score`, `acc` (1 if the answer is right, else 0) and `pred` (the answer). A ground truth
is the answer alone. GSM8K's and MATH's may also be the whole solution of the data set, whose answer
is found in the same way.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import islice
from typing import Any

from millrace.errors import RewardError
from millrace.rewards.answers import Form, extract, formula_text, formulas, required
from millrace.rewards.normalise import hendrycks, minerva
from millrace.rewards.sources import refusal, scorer_of

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


def format_reward(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    pattern: str,
) -> float:
    """Return 1 if the whole response matches the regular expression, else 0.

    This is the format reward of DeepSeek-R1 (arXiv 2501.12948, section 2.2.2) with a pattern of the
    user's. Open-R1's matches the start of the response and may end at any line.
    """
    return float(re.fullmatch(pattern, solution_str, re.DOTALL) is not None)


def repetition_penalty(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    ngram_size: int,
    max_penalty: float,
) -> float:
    """Return max_penalty * (1 - distinct n-grams / n-grams), from max_penalty to 0.

    An n-gram is `ngram_size` words in a row, in lower case. A response of fewer words scores 0. The
    formula is Open-R1's `repetition_penalty` (src/open_r1/rewards.py). It gives the response one
    number. In its origin, Yeo et al. 2025 (arXiv 2502.03373, appendix C.2), each token of a
    repeated n-gram has a penalty of its own.
    """
    words = solution_str.lower().split()
    total = len(words) - ngram_size + 1
    if total < 1:
        return 0.0
    ngrams = set(zip(*(islice(words, at, None) for at in range(ngram_size)), strict=False))
    return max_penalty * (1 - len(ngrams) / total)


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


def none(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """Return 0, for a run that learns from teachers alone."""
    return 0.0


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
    "none": none,
    "format": format_reward,
    "repetition_penalty": repetition_penalty,
}
"""The values of `reward.function` that are names. The last two take their options by name."""

NEEDS_TRUTH = frozenset(BUILTIN) - {"reasoning_gym", "none", "format", "repetition_penalty"}
"""The functions that compare with a ground truth, which every row must have then."""
