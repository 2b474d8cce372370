"""The tests of a launch script: `[ ]`, `[[ ]]`, `(( ))` and patterns of `case`, for known values."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence

from millrace.errors import ConfigError
from millrace.extras.verl.lines import words_of
from millrace.extras.verl.words import NAME, SET, Variables, expand, fits, is_literal

Answer = tuple[bool | None, ConfigError | None]
"""Whether a command succeeds, or None if nobody knows, and the error that says why."""

_SUCCEED = (":", "true", "echo", "printf", "cd", "pushd", "popd", "mkdir", "export", "set", "shift")
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_SIGNS = {"==": "-eq", "!=": "-ne", "<": "-lt", "<=": "-le", ">": "-gt", ">=": "-ge"}
_UNKNOWN: Answer = (None, None)


def judge(line: str, values: Variables) -> Answer:
    """Return whether a command that is not executed succeeds."""
    text = line.strip()
    if text.startswith("! "):
        known, cause = judge(text[2:], values)
        return (None if known is None else not known), cause
    if match := re.fullmatch(r"\(\(\s*(.*?)\s*(==|!=|<=|>=|<|>)\s*(.*?)\s*\)\)", text):
        return _caught([f"$(({match[1]}))", _SIGNS[match[2]], f"$(({match[3]}))"], values, line)
    if match := re.fullmatch(r"\[\[\s+(.*)\s+\]\]|\[\s+(.*)\s+\]|test\s+(.*)", text, re.S):
        return _any(words_of("".join(filter(None, match.groups()))), values, line)
    first = text.split()[0] if text else ""
    if first == "getopts" and not values.arguments:
        return False, None
    return (first != "false", None) if first in (*_SUCCEED, "false") else _UNKNOWN


def _any(words: Sequence[str], values: Variables, line: str) -> Answer:
    """Judge words with `||`, `&&` and their older spellings `-o` and `-a`."""
    for signs, end in ((("||", "-o"), True), (("&&", "-a"), False)):
        at = next((i for i, word in enumerate(words) if word in signs and i), None)
        if at is None:
            continue
        left, cause = _any(words[:at], values, line)
        if left is end:
            return left, None
        right, other = _any(words[at + 1 :], values, line)
        known = right if left is not None or right is end else None
        return known, None if known is not None else cause or other
    if words and words[0] == "!":
        known, cause = _any(words[1:], values, line)
        return (None if known is None else not known), cause
    return _caught(words, values, line)


def _caught(words: Sequence[str], values: Variables, line: str) -> Answer:
    try:
        return _test(words, values, line), None
    except ConfigError as error:
        return None, error


def _test(words: Sequence[str], values: Variables, line: str) -> bool | None:
    """Judge one test. Raises ConfigError for a variable without a value."""
    if len(words) == 2 and words[0] in ("-z", "-n", "-v"):
        return bool(_filled(words[1], values, line, named=words[0] == "-v")) != (words[0] == "-z")
    if len(words) == 1:
        return expand(words[0], values, line) != ""
    if len(words) != 3:
        return None
    left, sign = expand(words[0], values, line), words[1]
    right = expand(words[2], values, line)
    if sign in ("=", "==", "!="):
        literal = is_literal(words[2])
        if not literal and "[" in re.sub(SET, "", right):
            return None
        return (left == right or (not literal and fits(left, right))) == (sign != "!=")
    if sign in _NUMBERS and all(re.fullmatch(r"-?\d{1,18}", text) for text in (left, right)):
        return _NUMBERS[sign](int(left), int(right))
    return None


def _filled(word: str, values: Variables, line: str, *, named: bool) -> str:
    """Return a word in which a variable that nobody sets is empty, as in bash."""
    match = re.fullmatch(rf'"?\$?\{{?({NAME}|\d)\}}?"?', word)
    if match and match[1] not in values.causes and values.first(match[1]) is None:
        return ""
    return "set" if named else expand(word, values, line)


def matches(subject: str | None, patterns: str, values: Variables, line: str) -> bool | None:
    """Return whether a branch of `case` fits. None means that nobody knows."""
    if subject is None:
        return None
    try:
        words = [one.strip() for one in patterns.split("|")]
        globs = [expand(one, values, line) for one in words]
    except ConfigError:
        return None
    exact = [glob for one, glob in zip(words, globs, strict=True) if is_literal(one)]
    unclear = any("[" in re.sub(SET, "", glob) for glob in globs)
    found = subject in globs or any(fits(subject, g) for g in globs if g not in exact)
    return True if found else None if unclear else False
