"""The words of a launch script: references, arithmetic and quotes, as bash reads them."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Mapping

from millrace.errors import ConfigError, bad_value

NAME = r"[A-Za-z_]\w*"
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(math.copysign(abs(a) // abs(b), a * b)),
    ast.Mod: math.fmod,
}
"""As bash: a quotient is cut towards 0, and a remainder has the sign of the dividend."""


class Variables(dict[str, str]):
    """The values of variables."""

    def __init__(self, known: Mapping[str, str]) -> None:
        super().__init__(known)
        self.script: set[str] = set()
        """The variables that the script itself sets."""
        self.arrays: dict[str, list[str]] = {}
        self.causes: dict[str, ConfigError] = {}
        """Why a variable that the script sets has no value."""

    def forget(self, name: str, cause: ConfigError) -> None:
        """Leave a variable without a value, unless the caller gave one."""
        if name in self and name not in self.script:
            return
        self.pop(name, None)
        self.arrays.pop(name, None)
        self.script.add(name)
        self.causes[name] = cause


def expand(word: str, values: Variables, line: str) -> str:
    """Return a word with its variables and arithmetic replaced, and its quotes removed."""
    out, quote, at = "", "", 0
    while at < len(word):
        char = word[at]
        if char in "'\"" and quote in ("", char):
            quote = "" if quote else char
            at += 1
        elif char == "\\" and quote != "'" and at + 1 < len(word):
            kept = quote and word[at + 1] not in '$`"\\'  # bash keeps this backslash
            out += word[at : at + 2] if kept else word[at + 1]
            at += 2
        elif word.startswith("$'", at) and not quote:
            raise unknown(word[at:], line)
        elif char == "$" and quote != "'":
            text, at = _reference(word, at, values, line)
            out += text
        else:
            out += char
            at += 1
    return out


def _reference(word: str, at: int, values: Variables, line: str) -> tuple[str, int]:
    """Return the value of the reference at `at`, and where it ends."""
    rest = word[at:]
    if rest.startswith("$(("):
        end = _closing(rest, 1, "(", ")")
        return _arithmetic(rest[3 : end - 1], values, line), at + end + 1
    if rest.startswith("$("):
        raise unknown(rest[: _closing(rest, 1, "(", ")") + 1], line)
    if rest.startswith("${"):
        end = _closing(rest, 1, "{", "}")
        return _braces(rest[2:end], values, line), at + end + 1
    if match := re.match(rf"\$({NAME})", rest):
        return _value(match[1], values, line), at + match.end()
    if match := re.match(r"\$[\d#?]", rest):
        raise unknown(match[0], line)
    if re.match(r"\$[@*]", rest):
        return "", at + 2
    return "$", at + 1


def _closing(text: str, at: int, opening: str, closing: str) -> int:
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if depth == 0:
            return i
    raise bad_value("SCRIPT", text[:80], f"has no closing {closing!r}", f"add {closing!r}")


def _braces(inner: str, values: Variables, line: str) -> str:
    """Return `${inner}`, with bash's defaults and the removal of a prefix or suffix."""
    match = re.fullmatch(rf"({NAME}|[1-9])(:?[-=+?]|##?|%%?)?(.*)", inner, re.S)
    if not match:
        raise unknown(f"${{{inner}}}", line)
    name, sign, text = match.groups()
    if name in values.causes:
        raise values.causes[name]
    if sign and sign.strip(":") in "-=+?":
        listed = values.arrays.get(name)
        known = values.get(name, listed[0] if listed else None)
        absent = known is None or (sign.startswith(":") and not known)
        if absent and sign.endswith("?"):
            raise unknown(name, line)
        if sign.endswith("+"):
            return "" if absent else expand(text, values, line)
        result = expand(text, values, line) if absent else str(known)
        if sign.endswith("="):
            values.script.add(name)
            values[name] = result
        return result
    value = _value(name, values, line)
    if not sign:
        if text:
            raise unknown(f"${{{inner}}}", line)
        return value
    pattern = expand(text, values, line)
    cuts = list(range(len(value) + 1))
    if sign.startswith("#"):
        cuts = [i for i in cuts if _fits(value[:i], pattern)]
        return value[(max if len(sign) == 2 else min)(cuts, default=0) :]
    cuts = [i for i in cuts if _fits(value[i:], pattern)]
    return value[: (min if len(sign) == 2 else max)(cuts, default=len(value))]


def _fits(text: str, pattern: str) -> bool:
    """Return whether a glob of bash's, with `*` and `?`, matches the whole text."""
    glob = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(glob, text, re.S) is not None


def _value(name: str, values: Variables, line: str) -> str:
    if name in values.causes:
        raise values.causes[name]
    if name not in values:
        raise unknown(name, line)
    return values[name]


def unknown(name: str, line: str) -> ConfigError:
    set_name = re.match(rf"(?:export\s+)?({NAME})=", line)
    fix = name if re.fullmatch(NAME, name) else set_name[1] if set_name else ""
    return bad_value(
        "SCRIPT",
        " ".join(line.split())[:80],
        f"{name} has no value in the script, and nothing is executed",
        f"--set {fix}=VALUE" if fix else "write the value into the script",
    )


def _arithmetic(text: str, values: Variables, line: str) -> str:
    """Compute integer arithmetic of bash: + - * / % and brackets."""
    given = re.sub(rf"\$({NAME}|\{{[^{{}}]*\}})", lambda m: f"({expand(m[0], values, line)})", text)
    plain = re.sub(rf"\b{NAME}", lambda m: f"({_value(m[0], values, line)})", given)
    try:
        return str(_compute(ast.parse(plain.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
        rule = "this arithmetic cannot be computed"
        raise bad_value("SCRIPT", f"$(({text}))", rule, "write the number") from None


def _compute(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return int(_OPERATORS[type(node.op)](_compute(node.left), _compute(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_compute(node.operand)
    raise ValueError
