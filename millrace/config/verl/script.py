"""The overrides in a launch script of verl's, read without running the script.

Understood are assignments, `${NAME}` with verl's usual defaults `${NAME:-value}`, arithmetic
`$(( ))`, arrays, line continuations, quotes and comments. Nothing is executed: a variable that only
a command can set is an error that names it.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from millrace.errors import ConfigError, bad_value

_NAME = r"[A-Za-z_]\w*"
_OVERRIDE = re.compile(r"^(?:\+{0,2}[A-Za-z_][\w.]*=|~[A-Za-z_][\w.]*)")
_ASSIGNMENT = re.compile(rf"^{_NAME}\+?=")
_OPENING = ("if", "for", "while", "until", "case")
_CLOSING = ("fi", "done", "esac")
_PROGRAMS = (
    ("fully_async", "verl/fully_async_ppo_trainer"),
    ("one_step_off", "verl/one_step_off_ppo_trainer"),
    ("main_ppo", "verl/ppo_trainer"),
)
"""A part of the name of verl's program, and the recipe with its defaults."""
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(math.copysign(abs(a) // abs(b), a * b)),
    ast.Mod: math.fmod,
}
"""As bash: a quotient is cut towards 0, and a remainder has the sign of the dividend."""


class _Variables(dict[str, str]):
    """The values of variables."""

    def __init__(self, known: Mapping[str, str]) -> None:
        super().__init__(known)
        self.script: set[str] = set()
        """The variables that the script itself sets."""
        self.causes: dict[str, ConfigError] = {}
        """Why a variable that the script sets has no value."""


@dataclass(slots=True)
class Script:
    """What a launch script says."""

    overrides: list[str] = field(default_factory=list)
    """`key=value`, in their order, with all variables replaced."""
    base: str = ""
    """The packaged recipe with the defaults of the program that the script starts, or empty."""


def read(text: str, variables: Mapping[str, str]) -> Script:
    """Return the overrides of a script.

    `variables` are the values of names that the script does not set itself. Raises ConfigError for
    all variables without a value that an override needs, for arithmetic that cannot be computed,
    and for an open quote.
    """
    errors: dict[str, None] = {}
    values = _Variables(variables)
    arrays: dict[str, list[str]] = {}
    script = Script()
    depth = 0
    for whole in _lines(text):
        line = re.sub(r"^(?:then|else|do)\s+", "", whole)
        first = line.split()[0]
        depth += (first in _OPENING) - (first in _CLOSING)
        body = re.sub(r"^(?:export|local|readonly|declare|typeset)(?:\s+-\w+)*\s+", "", line)
        words = _words(body)
        if match := re.match(rf"^({_NAME})(\+?)=\((.*)\)$", body, re.S):
            _assign_array(values, arrays, match, line, unknown=depth > 0)
        elif words and all(_ASSIGNMENT.match(word) for word in words):
            for word in words:
                name, _, text_ = word.partition("=")
                _assign(values, name, text_, line, unknown=depth > 0)
        else:
            while words and _ASSIGNMENT.match(words[0]):  # the environment of one command
                words.pop(0)
            errors |= dict.fromkeys(_command(script, words, line, values, arrays))
    if errors:
        raise ConfigError("\n".join(errors))
    return script


def _assign_array(
    values: _Variables,
    arrays: dict[str, list[str]],
    match: re.Match[str],
    line: str,
    *,
    unknown: bool,
) -> None:
    """Keep the words of an array. An array that is set inside `if` or a loop stays unknown."""
    name, added, text = match.groups()
    if unknown:
        arrays.pop(name, None)
        values.causes[name] = _branched(name, line)
        return
    items = [_expand(word, values, line) for word in _words(text)]
    arrays[name] = [*(arrays.get(name, []) if added else []), *items]


def _assign(values: _Variables, name: str, text: str, line: str, *, unknown: bool) -> None:
    """Keep the value of a variable. A value that only a command or a branch knows stays unknown.

    A value from the caller wins: it is the answer to an error of this script.
    """
    added = name.endswith("+")
    name = name.removesuffix("+")
    if name in values and name not in values.script:
        return
    values.script.add(name)
    words = _words(text)
    try:
        if unknown:
            raise _branched(name, line)
        if "`" in text:
            raise _unknown(name, line)
        before = values.get(name, "") if added else ""
        values[name] = before + (_expand(words[0], values, line) if words else "")
        values.causes.pop(name, None)
    except ConfigError as error:
        values.pop(name, None)
        values.causes[name] = error  # it is raised where an override needs the name


def _command(
    script: Script,
    command: list[str],
    line: str,
    values: _Variables,
    arrays: Mapping[str, list[str]],
) -> list[str]:
    """Add the overrides of one command, if it has any. Returns the errors of its words."""
    if not command or command[0] in ("echo", "printf"):
        return []
    programs = [base for part, base in _PROGRAMS if any(part in word for word in command)]
    known = [item for word in command for item in arrays.get(_array_of(word), [])]
    if not programs and not any(_is_override(word) for word in (*command, *known)):
        return []  # another command, such as `set -x`
    script.base = script.base or (programs[0] if programs else "")
    errors = []
    for word in command:
        try:
            words = _overrides(word, line, values, arrays)
        except ConfigError as error:
            errors.append(str(error))
        else:
            script.overrides += [w for w in words if _is_override(w)]
    return errors


def _overrides(
    word: str, line: str, values: _Variables, arrays: Mapping[str, list[str]]
) -> list[str]:
    """Return the words that one word of a command becomes, if it may hold overrides."""
    if name := _array_of(word):
        if name not in arrays:
            raise values.causes.get(name) or _unknown(name, line)
        return arrays[name]
    if re.fullmatch(rf"\$\{{?{_NAME}\}}?", word):  # without quotes, bash splits the value
        return _expand(word, values, line).split()
    return [_expand(word, values, line)] if _is_override(word) else []


def _array_of(word: str) -> str:
    """Return the name of the array that a word like "${NAME[@]}" stands for, or ""."""
    match = re.fullmatch(rf'"?\$\{{({_NAME})\[[@*]\]\}}"?', word)
    return match[1] if match else ""


def _is_override(word: str) -> bool:
    """Return whether a word is `section.key=value`, or Hydra's form of it with + or ~."""
    word = _bare(word)
    return bool(_OVERRIDE.match(word)) and "." in word.partition("=")[0]


def _bare(word: str) -> str:
    return word.lstrip("'\"")


def _lines(text: str) -> list[str]:
    """Return the script's logical lines: without comments, continuations and blank lines.

    A line with an open bracket or quote goes on in the next one.
    """
    lines: list[str] = []
    pending = ""
    for raw in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
        pending = f"{pending}\n{raw}" if pending else raw
        bare = _without_comment(pending)
        if _is_open(bare):
            continue
        lines += [part.strip() for part in _commands(bare) if part.strip()]
        pending = ""
    if pending.strip():
        raise bad_value(
            "SCRIPT",
            pending.strip().splitlines()[0][:80],
            "has an open quote or bracket",
            "close it",
        )
    return lines


def _scan(text: str, brackets: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the position, the character and whether it is bare, for each character and the end.

    A bare character stands outside of quotes and brackets. A bracket itself is not bare. `brackets`
    has the kinds that count, each with its two sides.
    """
    quote, depth = "", 0
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
            yield at, char, False
            continue
        quote = char if char in "'\"" else ""
        if char in brackets:
            depth += 1 if brackets.index(char) % 2 == 0 else -1
            yield at, char, False
        else:
            yield at, char, not quote and depth <= 0
    yield len(text), "", not quote and depth <= 0


_ALL = "()[]{}"


def _commands(text: str) -> list[str]:
    """Split a line at `;`, `&&` and `||` outside of quotes and brackets."""
    parts, start = [], 0
    for at, char, bare in _scan(text, _ALL):
        sign = char if char == ";" else text[at : at + 2]
        if bare and at >= start and sign in (";", "&&", "||"):
            parts.append(text[start:at])
            start = at + len(sign)
    return [*parts, text[start:]]


def _without_comment(text: str) -> str:
    """Remove comments: `#` at the start of a word, outside of quotes."""
    out = ""
    while True:
        starts = (
            at
            for at, char, bare in _scan(text, "")
            if bare and char == "#" and (at == 0 or text[at - 1].isspace())
        )
        at = next(starts, len(text))
        end = text.find("\n", at)
        out += text[:at]
        if end < 0:
            return out
        text = text[end:]


def _is_open(text: str) -> bool:
    """Return whether a quote is open, or the brackets of an array or of arithmetic."""
    return not all(bare for at, _, bare in _scan(text, "()") if at == len(text))


def _words(text: str) -> list[str]:
    """Split a line at spaces outside of quotes and of `$(( ))`. Quotes stay."""
    words, start = [], 0
    for at, char, bare in _scan(text, _ALL):
        if at == len(text) or (bare and char.isspace()):
            words.append(text[start:at])
            start = at + 1
    return [word for word in words if word]


def _expand(word: str, values: _Variables, line: str) -> str:
    """Return a word with its variables and arithmetic replaced, and its quotes removed."""
    out, quote, at = "", "", 0
    while at < len(word):
        char = word[at]
        if char in "'\"" and quote in ("", char):
            quote = "" if quote else char
            at += 1
        elif char == "\\" and quote != "'" and at + 1 < len(word):
            out += word[at + 1]
            at += 2
        elif char == "$" and quote != "'":
            text, at = _reference(word, at, values, line)
            out += text
        else:
            out += char
            at += 1
    return out


def _reference(word: str, at: int, values: _Variables, line: str) -> tuple[str, int]:
    """Return the value of the reference at `at`, and where it ends."""
    rest = word[at:]
    if rest.startswith("$(("):
        end = _closing(rest, 1, "(", ")")
        return _arithmetic(rest[3 : end - 1], values, line), at + end + 1
    if rest.startswith("$("):
        raise _unknown(rest[: _closing(rest, 1, "(", ")") + 1], line)
    if rest.startswith("${"):
        end = _closing(rest, 1, "{", "}")
        return _braces(rest[2:end], values, line), at + end + 1
    if match := re.match(rf"\$({_NAME})", rest):
        return _value(match[1], values, line), at + match.end()
    if match := re.match(r"\$[\d#?]", rest):
        raise _unknown(match[0], line)
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


def _braces(inner: str, values: _Variables, line: str) -> str:
    """Return `${inner}`, with bash's defaults and the removal of a prefix or suffix."""
    match = re.fullmatch(rf"({_NAME})(:?[-=]|##?|%%?)?(.*)", inner, re.S)
    if not match:
        raise _unknown(f"${{{inner}}}", line)
    name, sign, text = match.groups()
    if name in values.causes:
        raise values.causes[name]
    if sign and sign.strip(":") in "-=":
        known = values.get(name)
        use = known is None or (sign.startswith(":") and not known)
        return _expand(text, values, line) if use else str(known)
    value = _value(name, values, line)
    if not sign:
        if text:
            raise _unknown(f"${{{inner}}}", line)
        return value
    pattern = _expand(text, values, line)
    glob = re.escape(pattern).replace(r"\*", ".*" if len(sign) == 2 else ".*?")
    if sign.startswith("#"):
        return re.sub(f"^{glob}", "", value, count=1, flags=re.S)
    cuts = [
        i for i in range(len(value) + 1) if re.fullmatch(glob.replace("?", ""), value[i:], re.S)
    ]
    return value[: (min if len(sign) == 2 else max)(cuts)] if cuts else value


def _value(name: str, values: _Variables, line: str) -> str:
    if name in values.causes:
        raise values.causes[name]
    if name not in values:
        raise _unknown(name, line)
    return values[name]


def _unknown(name: str, line: str) -> ConfigError:
    set_name = re.match(rf"(?:export\s+)?({_NAME})=", line)
    fix = name if re.fullmatch(_NAME, name) else set_name[1] if set_name else ""
    return bad_value(
        "SCRIPT",
        " ".join(line.split())[:80],
        f"{name} has no value in the script, and nothing is executed",
        f"--set {fix}=VALUE" if fix else "write the value into the script",
    )


def _branched(name: str, line: str) -> ConfigError:
    shown = " ".join(line.split())[:80]
    rule = f"{name} is set inside `if`, `case` or a loop, and nothing is executed"
    return bad_value("SCRIPT", shown, rule, f"--set {name}=VALUE")


def _arithmetic(text: str, values: _Variables, line: str) -> str:
    """Compute integer arithmetic of bash: + - * / % and brackets."""
    plain = re.sub(rf"\$?\{{?({_NAME})\}}?", lambda m: f"({_value(m[1], values, line)})", text)
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
