"""Built-in scorers, in verl's signature.

Each returns 1 for a right answer, 0 for a wrong one, or a task's own partial score.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from millrace.errors import RewardError

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TUPLES = frozenset({"arc_agi", "rearc"})
"""Data sets whose scorers compare boards as tuples. JSON has no tuples."""


def default(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """Score a row if `reward.function` is empty.

    Rows of reasoning_gym: sources use reasoning-gym's own scorer. All others use exact match.
    """
    scorer = reasoning_gym if "reasoning_gym" in extra_info else exact
    return scorer(data_source, solution_str, ground_truth, extra_info)


def exact(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """Return 1 if the completion equals the ground truth, or one of a list of ground truths.

    Space at both ends is ignored.
    """
    _require(data_source, ground_truth)
    accepted = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    return float(solution_str.strip() in [str(truth).strip() for truth in accepted])


def math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """Return 1 if math-verify finds the completion's answer equal to the ground truth.

    In GSM8K, the ground truth is the text after ####. The answer is the first that exists of a
    formula after "final answer is", all boxes, and the last formula or number of the completion.
    Several boxes are one answer, the set of their contents: boxes of 1 and 2 do not equal 2.
    math-verify's own deadlines are off, because they need signals. The pool has a deadline that
    also stops code that ignores signals.
    """
    from math_verify import parse, verify

    _require(data_source, ground_truth)
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = _gold(str(ground_truth).split("####")[-1].strip())
    return float(
        verify(list(gold), parse(solution_str, parsing_timeout=None), timeout_seconds=None)
    )


def _require(data_source: str, ground_truth: Any) -> None:
    if ground_truth is None:
        raise RewardError(
            "no_ground_truth", f"a row of {data_source} has no ground truth to compare with"
        )


@lru_cache(maxsize=1024)
def _gold(text: str) -> tuple[Any, ...]:
    from math_verify import parse

    forms = [text] if "\\boxed" in text or "$" in text else [f"\\boxed{{{text}}}", text]
    for form in forms:
        parsed = parse(form, parsing_timeout=None)
        if parsed:
            return tuple(parsed)
    raise RewardError(
        "bad_ground_truth", f"math-verify finds no mathematics in the ground truth {text[:80]!r}"
    )


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """Return reasoning-gym's score for the completion's last <answer>, or for all of its text."""
    metadata = extra_info.get("metadata") or {}
    name = extra_info.get("reasoning_gym") or metadata.get("source_dataset") or data_source
    answers = _ANSWER.findall(solution_str)
    answer = (answers[-1] if answers else solution_str).strip()
    entry = {
        "question": extra_info.get("question", ""),
        "answer": ground_truth,
        "metadata": _tupled(metadata) if name in _TUPLES else metadata,
    }
    return float(_scorer(name)(answer, entry))


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


BUILTIN: dict[str, Callable[..., float]] = {
    "": default,
    "exact": exact,
    "math": math,
    "reasoning_gym": reasoning_gym,
}
