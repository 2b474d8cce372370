"""The scorer of each data source, for runs without `reward.function`.

The names are those of verl's `default_compute_score` (utils/reward_score/__init__.py), of
millrace's tasks, and of reasoning-gym's rows. No other source has a scorer: a guess would train
the wrong thing silently.
"""

from __future__ import annotations

import re
from typing import Any

from millrace.data.spec import nearest
from millrace.data.tasks import TASKS

_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
SCORERS: dict[str, str] = {
    **dict.fromkeys(TASKS, "exact"),
    **dict.fromkeys(("products", "sums"), "last_number"),  # the answer may be a sentence
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math_reward",
    "DigitalLearningGmbH/MATH-lighteval": "math_reward",
    "HuggingFaceH4/MATH-500": "math_reward",
    "math_dapo": "math_dapo",
    "math": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    **{f"numina_{name}": "math" for name in _NUMINA},
}
"""The built-in scorer of each data source. verl's prime_math is math-verify here."""

_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(/\d+)?%?")
_AIME = "aime"
"""verl scores every data source whose name starts with this by math_dapo."""

_CODE = "no scorer of millrace runs the code of its problems; yours may, with reward.sandbox=true"
_IMAGES = "its problems have images, and millrace trains on text alone"
_SEARCH = "its responses need a search tool, which millrace does not have"
_REFUSED: dict[str, str] = {
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), _CODE),
    "hiyouga/geometry3k": _IMAGES,
}
_SEARCHED = "searchR1_"


def scorer_of(data_source: str, extra_info: dict[str, Any]) -> str | None:
    """Return the name of the built-in scorer of a row, or None if its source is unknown.

    Rows of `reasoning_gym:` sources use reasoning-gym's own scorer. So do rows of unknown sources
    whose `metadata.source_dataset` is a data set of reasoning-gym.
    """
    if "reasoning_gym" in extra_info:
        return "reasoning_gym"
    if data_source.startswith(_AIME):
        return "math_dapo"
    if data_source in SCORERS:
        return SCORERS[data_source]
    metadata = extra_info.get("metadata")
    name = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    return "reasoning_gym" if isinstance(name, str) and _generated(name) else None


_BARE: dict[str, tuple[str, str]] = {
    "exact": (
        "it pays a response that is the answer and nothing else",
        "a prompt that asks for the answer alone",
    ),
    "reasoning_gym": (
        "for a right answer inside a sentence it mostly pays len(answer) / len(response)",
        "a prompt that asks for the answer alone, or between <answer> and </answer>",
    ),
    "gsm8k_flexible": (
        "it takes a full stop after the last number as part of it, so '4.' is not 4",
        "a prompt that asks for the number alone",
    ),
}
"""Scorers that pay little for the sentences of a chat model: the reason, and what helps."""


def advice_for_chat(
    section: str, function: str, data_source: str, extra_info: dict[str, Any], truth: Any
) -> str:
    """Return a warning if the scorer of a row does not fit the answers of a chat model, else "".

    `section` is the reward's section, and `function` its function, "" for the scorer of the source.
    """
    own = scorer_of(data_source, extra_info)
    name = function or own or ""
    if name == "math" and own == "last_number":
        echo = "it evaluates formulas, so an answer that repeats the question is right"
        fix = f"{section}.function=last_number"
        return f"warning: {section}.function = 'math', {data_source}: {echo}. Fix: {fix}."
    if name not in _BARE:
        return ""
    why, fix = _BARE[name]
    if _NUMBER.fullmatch(str(truth).split("####")[-1].strip()):
        fix = f"{section}.function=last_number, which reads sentences, or {fix}"
    rule = f"the scorer {name!r} and a model with a chat template: {why}"
    return f"warning: {section}.function = {function!r}, {data_source}: {rule}. Fix: {fix}."


def _generated(name: str) -> bool:
    import reasoning_gym

    return name in reasoning_gym.factory.DATASETS


def refusal(data_source: str, extra_info: dict[str, Any]) -> tuple[str, str] | None:
    """Return (rule, fix) if no built-in scorer belongs to a row, else None."""
    if scorer_of(data_source, extra_info) is not None:
        return None
    own = "reward.function=path.py:name"
    why = _SEARCH if data_source.startswith(_SEARCHED) else _REFUSED.get(data_source)
    if why is not None:
        return f"no built-in scorer: {why}", f"{own} with a scorer of your own"
    named = [name for name in SCORERS if name not in TASKS and not name.startswith("numina_")]
    known = ", ".join((*named, f"{_AIME}*", "numina_*"))
    meant = nearest(data_source, SCORERS, "data_source: {}, ")
    meant = "" if meant.startswith("one of") else meant
    return (
        f"no built-in scorer belongs to this data source; known are {known}",
        f"{meant}{own}, or reward.function=exact (or last_number, math, gsm8k, math_dapo) for all rows",
    )
