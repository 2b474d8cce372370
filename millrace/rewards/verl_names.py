"""verl's scorers by verl's names, for reward files that import `verl.utils.reward_score`.

Where verl is not installed, these functions stand in for its modules. They are millrace's own
scorers, with verl's parameters and results.
"""

from __future__ import annotations

import asyncio
from typing import Any

from millrace.rewards.answers import extract
from millrace.rewards.builtin import BUILTIN, math
from millrace.rewards.builtin import math_dapo as dapo
from millrace.rewards.normalise import hendrycks, minerva
from millrace.rewards.sources import refusal, scorer_of


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **options: Any
) -> float | dict[str, Any]:
    """Return the score of the data source's scorer: a number, or math_dapo's dict.

    Raises NotImplementedError if the source has none, as verl does.
    """
    name = scorer_of(data_source, {})
    if name is None:
        rule, fix = refusal(data_source, {}) or ("", "")
        raise NotImplementedError(f"data_source {data_source!r}: {rule}. Fix: {fix}")
    if name == "math_dapo":
        return _dapo_score(solution_str, ground_truth)
    result = BUILTIN[name](data_source, solution_str, ground_truth, {})
    return float(result["score"] if isinstance(result, dict) else result)


def _gsm8k_solution(solution_str: str, method: str = "strict") -> str | None:
    return extract(solution_str, "hashes" if method == "strict" else "number")


def _gsm8k_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    answer = _gsm8k_solution(solution_str, method)
    return 0.0 if answer is None else score if answer == ground_truth else format_score


def _equal(one: str | None, other: str | None, verbose: bool = False) -> bool:
    """Return whether two answers have the same normal form of MATH."""
    if one is None or other is None:
        return one is other
    try:
        return hendrycks(one) == hendrycks(other)
    except ValueError:
        return one == other


def _box(string: str) -> str | None:
    content = extract(string, "boxed")
    return None if content is None else f"\\boxed{{{content}}}"


def _content(box: str) -> str:
    """Return the content of a box. Raises ValueError for another text."""
    if box.startswith("\\boxed "):
        return box.removeprefix("\\boxed ")
    if not (box.startswith("\\boxed{") and box.endswith("}")):
        raise ValueError(f"{box!r} is no \\boxed{{}}")
    return box[len("\\boxed{") : -1]


def _math_score(solution_str: str, ground_truth: Any) -> float:
    answer = extract(solution_str, "boxed")
    return float(answer is not None and _equal(answer, str(ground_truth)))


def _minerva_matches(solution_str: str, gt: str, gt_need_extract: bool = False) -> tuple[bool, str]:
    truth = extract(gt, "boxed") or "" if gt_need_extract else gt
    answer = extract(solution_str, "answer_line")
    return answer == minerva(truth), _INVALID if answer is None else answer


_INVALID = "[INVALID]"
"""verl's answer of a response that has none."""


def _strict_box(pred: str, gt: str, pause_tokens_index: Any = None) -> tuple[int, str | None]:
    answer = extract(pred, "boxed_end")
    return (1 if answer == gt else -1), answer


def _dapo_score(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: Any = None,
) -> dict[str, Any]:
    if strict_box_verify:
        sign, answer = _strict_box(solution_str, str(ground_truth))
        return {"score": float(sign), "acc": sign == 1, "pred": answer}
    result = dapo("math_dapo", solution_str, ground_truth, {})
    assert isinstance(result, dict)
    answer = _INVALID if result["pred"] is None else result["pred"]
    return {"score": result["score"], "acc": result["acc"] == 1.0, "pred": answer}


def _dapo_verify(
    solution_str: str,
    answer: str,
    strict_box_verify: bool = False,
    pause_tokens_index: Any = None,
) -> tuple[bool, str | None]:
    result = _dapo_score(solution_str, answer, strict_box_verify)
    return result["acc"], result["pred"]


def _verified(model_output: str, ground_truth: Any, *limits: float, **options: Any) -> float:
    return float(math("math", model_output, str(ground_truth), {})["score"])


def _prime_score(model_output: str, ground_truth: Any) -> tuple[bool, bool, str | None]:
    result = math("math", str(model_output), str(ground_truth), {})
    right = result["score"] == 1.0
    return right, right, result["pred"]


def _event_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.new_event_loop()


_BOXES = {"last_boxed_only_string": _box, "remove_boxed": _content}
_MATH = {"compute_score": _math_score, "is_equiv": _equal, "strip_string": hendrycks, **_BOXES}
_PACKAGE = "verl.utils.reward_score"

MODULES: dict[str, dict[str, Any]] = {
    _PACKAGE: {
        "default_compute_score": default_compute_score,
        "_default_compute_score": default_compute_score,
        "get_default_compute_score": lambda reward_name=None: default_compute_score,
    },
    f"{_PACKAGE}.gsm8k": {"compute_score": _gsm8k_score, "extract_solution": _gsm8k_solution},
    f"{_PACKAGE}.math": _MATH,
    f"{_PACKAGE}.math_reward": _MATH,
    f"{_PACKAGE}.math_dapo": {
        "compute_score": _dapo_score,
        "normalize_final_answer": minerva,
        "is_correct_minerva": _minerva_matches,
        "is_correct_strict_box": _strict_box,
        "verify": _dapo_verify,
        **_BOXES,
    },
    f"{_PACKAGE}.math_verify": {"compute_score": _verified},
    f"{_PACKAGE}.prime_math": {"compute_score": _prime_score},
    "verl.utils.import_utils": {"deprecated": lambda *old: lambda function: function},
    "verl.utils.ray_utils": {"get_event_loop": _event_loop},
}
"""The modules of verl that have a stand-in, with their names."""
