"""The answer in a response: rewards, maj@k and transcripts all find it with `extract`.

A scorer extracts the answer that it judges, and returns it with its score. Validation reads it from
there, so a vote and a transcript never see another answer than the reward did.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

from millrace.errors import RewardError
from millrace.rewards.normalise import minerva

Form = Literal[
    "tag", "hashes", "number", "last_number", "boxed", "boxed_end", "answer_line", "formula", "any"
]
"""Where a response has its answer.

| form | the answer |
|---|---|
| tag | the text of the last `<answer>...</answer>` |
| hashes | the number after the last `#### `, without commas |
| number | the last number, as it is written |
| last_number | the last number, without commas and without a full stop after it |
| boxed | the content of the last `\\boxed{}` |
| boxed_end | the same in the last 100 characters |
| answer_line | the rest of the line after the last `Answer:`, in Minerva's normal form |
| formula | the formula or number that math-verify finds |
| any | the first of tag, boxed, hashes and answer_line that the response has |

hashes, number and answer_line read the last 300 characters alone, as verl does.
"""

END = 300
"""Characters at the end of a response that have its answer (verl's gsm8k and math_dapo)."""
BOX_END = 100
"""The same for the box that replaces a missing `Answer:` line (verl's math_dapo)."""

_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")
_LAST_NUMBER = re.compile(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?")
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def extract(text: str, form: Form) -> str | None:
    """Return the answer of a response, or None if it has none in this form."""
    return _FORMS[form](text)


def required(data_source: str, ground_truth: Any) -> Any:
    """Return the ground truth of a row. Raise RewardError if the row has none."""
    if ground_truth is None:
        raise RewardError(
            "no_ground_truth", f"a row of {data_source} has no ground truth to compare with"
        )
    return ground_truth


def formulas(text: str) -> list[Any]:
    """Return what math-verify reads in a text: sympy's forms of the answer, then its text."""
    from math_verify import parse

    return list(parse(text, parsing_timeout=None))


def formula_text(parsed: list[Any]) -> str | None:
    """Return the answer's own text from `formulas`, or None if there is no answer."""
    return str(parsed[-1]) if parsed else None


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text)
    return matches[-1] if matches else None


def _tag(text: str) -> str | None:
    for part in reversed(text.split("</answer>")[:-1]):
        _, opened, answer = part.partition("<answer>")
        if opened:
            return answer.strip()
    return None


def _hashes(text: str) -> str | None:
    number = _last(_HASHES, text[-END:])
    return None if number is None else number.replace(",", "")


def _number(text: str) -> str | None:
    return next((n for n in reversed(_NUMBER.findall(text[-END:])) if n != "."), None)


def _last_number(text: str) -> str | None:
    number = _last(_LAST_NUMBER, text)
    return None if number is None else number.replace(",", "")


def _boxed(text: str) -> str | None:
    """Return the content of the last box. A box without braces ends at the next dollar sign."""
    if "\\boxed " in text:
        return text.rsplit("\\boxed ", 1)[1].partition("$")[0]
    return _braces(text, text.rfind("\\boxed"))


def _boxed_end(text: str) -> str | None:
    end = text[-BOX_END:]
    return _braces(end, end.rfind("\\boxed{"))


def _braces(text: str, start: int) -> str | None:
    """Return the text in the braces of the box at `start`, or None if they do not match."""
    opened = len("\\boxed{")
    if start < 0 or text[start : start + opened] != "\\boxed{":
        return None
    depth = 1
    for at in range(start + opened, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start + opened : at]
    return None


def _answer_line(text: str) -> str | None:
    answer = _last(_ANSWER_LINE, text[-END:])
    return None if answer is None else minerva(answer)


def _formula(text: str) -> str | None:
    return formula_text(formulas(text))


def _any(text: str) -> str | None:
    answers = (read(text) for read in (_tag, _boxed, _hashes, _answer_line))
    return next((answer for answer in answers if answer is not None), None)


_FORMS: dict[Form, Callable[[str], str | None]] = {
    "tag": _tag,
    "hashes": _hashes,
    "number": _number,
    "last_number": _last_number,
    "boxed": _boxed,
    "boxed_end": _boxed_end,
    "answer_line": _answer_line,
    "formula": _formula,
    "any": _any,
}
