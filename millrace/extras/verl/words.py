"""The words of a launch script: references, arithmetic and quotes, as bash reads them."""

from __future__ import annotations

import ast
import math
import operator
import posixpath
import re
import time
from collections.abc import Collection, Mapping, Sequence, Sized
from typing import Any

from millrace.errors import ConfigError, bad_value
from millrace.extras.verl.lines import commands, words_of

NAME = r"[A-Za-z_]\w*"
SET = r"\[(?:0-9|a-z|A-Z|\w)+\]"
"""A set of letters in a glob. No other set is read, such as `[!a]` or `[d-f]`."""
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(math.copysign(abs(a) // abs(b), a * b)),
    ast.Mod: math.fmod,
}
"""As bash: a quotient is cut towards 0, and a remainder has the sign of the dividend."""

_LONGEST = 1 << 20


class Unknown(ConfigError):
    """A variable, a command or a branch has no value that the script tells."""

    name: str = ""
    """The variable that --set may give, or empty."""


class Variables(dict[str, str]):
    """The values of variables. Those of the caller are answers: no command of the script changes them."""

    def __init__(self, known: Mapping[str, str], environment: Mapping[str, str]) -> None:
        super().__init__({**environment, **known})
        self.given = set(known)
        self.script = set(environment)
        """The variables that the script sets, or may set."""
        self.arrays: dict[str, list[str]] = {}
        self.arguments: list[str] = []
        """The words of `$@`."""
        self.causes: dict[str, ConfigError] = {}
        """Why a variable that the script sets has no value."""

    def forget(self, name: str, cause: ConfigError) -> None:
        """Leave a variable without a value, unless the caller gave one."""
        if name in self.given:
            return
        self.pop(name, None)
        self.arrays.pop(name, None)
        self.script.add(name)
        self.causes[name] = cause

    def kept(self) -> tuple[dict[str, Any], ...]:
        """Return all values as they are, for `restore`."""
        return dict(self), dict(self.arrays), dict(self.causes)

    def restore(self, kept: Sequence[dict[str, Any]], names: Collection[str] | None = None) -> None:
        """Give variables the values that they had, or only those of `names`."""
        all_values: tuple[dict[str, Any], ...] = (self, self.arrays, self.causes)
        for present, before in zip(all_values, kept, strict=True):
            for name in {*present, *before} if names is None else names:
                present.pop(name, None)
                if name in before:
                    present[name] = before[name]

    def put(self, name: str, text: str, *, added: bool) -> None:
        """Set a variable, or add to it. An array's is its first word."""
        value = (self.first(name) or "") + text if added else text
        if name in self.arrays:
            self.arrays[name] = [value, *self.arrays[name][1:]]
        else:
            self[name] = value
        self.script.add(name)
        self.causes.pop(name, None)

    def first(self, name: str) -> str | None:
        """Return the value of `$name`: of an array it is the first word."""
        if name.isdigit() and name != "0":
            return dict(enumerate(self.arguments, 1)).get(int(name), self.get(name))
        listed = self.arrays.get(name)
        return self.get(name, listed[0] if listed else "" if listed == [] else None)

    def words(self, name: str) -> list[str] | None:
        """Return the words of an array, also of one that the caller gave as a text."""
        if name in self.given:
            return [expand(word, self, self[name]) for word in words_of(self[name])]
        return self.arrays.get(name, [self[name]] if name in self else None)


def expand(word: str, values: Variables, line: str, blank: str = r"\g<0>") -> str:
    """Return a word with its variables and arithmetic replaced, and its quotes removed.

    `blank` takes the place of each space of a value whose reference has no quotes: bash splits there.
    """
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
        elif char == "`" and quote != "'":
            end = _closing(word[at + 1 :], 0, "", "`") + at + 1
            out += _substitution(word[at + 1 : end], values, line)
            at = end + 1
        elif char == "$" and quote != "'":
            text, at = _reference(word, at, values, line)
            out += text if quote else re.sub(r"\s", blank, text)
            check_size(out, line)
        else:
            out += char
            at += 1
    return out


def check_size(value: Sized, line: str) -> None:
    """Raise ConfigError for a text or a list that no command can have, as of a doubled variable."""
    if len(value) > _LONGEST:
        rule = f"makes a value of more than {_LONGEST:,} letters or words"
        raise bad_value("SCRIPT", shown(line), rule, "the value itself, by --set or in the script")


def _reference(word: str, at: int, values: Variables, line: str) -> tuple[str, int]:
    """Return the value of the reference at `at`, and where it ends."""
    rest = word[at:]
    if rest.startswith("$(("):
        end = _closing(rest, 1, "(", ")")
        return _arithmetic(rest[3 : end - 1], values, line), at + end + 1
    if rest.startswith("$["):  # the older spelling of $(( ))
        end = _closing(rest, 1, "[", "]")
        return _arithmetic(rest[2:end], values, line), at + end + 1
    if rest.startswith("$("):
        end = _closing(rest, 1, "(", ")")
        return _substitution(rest[2:end], values, line), at + end + 1
    if rest.startswith("${"):
        end = _closing(rest, 1, "{", "}")
        return _braces(rest[2:end], values, line), at + end + 1
    if match := re.match(rf"\$({NAME}|\d)", rest):
        return _value(match[1], values, line), at + match.end()
    if rest.startswith("$#"):
        return str(len(values.arguments)), at + 2
    if rest[1:2] in ("?", "$", "!"):
        raise unknown(rest[:2], line)
    if re.match(r"\$[@*]", rest):
        return " ".join(values.arguments), at + 2
    return "$", at + 1


def _substitution(inner: str, values: Variables, line: str) -> str:
    """Return what `$(inner)` prints, for the few commands whose output is known without them."""
    found = unknown(f"$({inner})", line)
    parts = [words_of(text) for text, _ in commands(inner)]
    if any(re.search(r"[|<>]", word) for words in parts for word in words):
        raise found
    *before, (name, *words) = parts or [[""]]
    given = [expand(word, values, line) for word in words]
    folder = values.get("PWD", "")
    if [name for name, *_ in before] == ["cd"] and len(before[0]) == 2:
        folder = posixpath.join(folder, expand(before[0][1], values, line))
    elif before:
        raise found
    if name == "date" and len(given) == 1 and given[0][:1] == "+" and "N" not in given[0]:
        return time.strftime(given[0][1:])
    if name == "pwd" and not given and folder:
        return posixpath.normpath(folder)
    if name == "whoami" and not given and "USER" in values:
        return values["USER"]
    if name == "echo" and given and given[0][:1] != "-":
        return " ".join(given)
    if name in ("basename", "dirname", "realpath") and given and given[0][:1] != "-":
        path = given[0].rstrip("/") or "/"
        if name == "basename":
            return posixpath.basename(path).removesuffix(given[1] if given[1:] else "")
        return posixpath.normpath(
            posixpath.join(folder, path) if name == "realpath" else posixpath.dirname(path)
        )
    raise found


def _closing(text: str, at: int, opening: str, closing: str) -> int:
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if depth == (0 if opening else -1):
            return i
    raise bad_value("SCRIPT", text[:80], f"has no closing {closing!r}", f"add {closing!r}")


_BRACES = re.compile(
    rf"(#?)({NAME}|\d)(\[(?:\d+|[@*])\])?(:?[-=+?]|##?|%%?|,,|\^\^|//?)?(.*)", re.S
)


def _braces(inner: str, values: Variables, line: str) -> str:
    """Return `${inner}`, with bash's defaults, cuts, replacements, cases and lengths."""
    match = _BRACES.fullmatch(inner)
    if not match:
        raise unknown(f"${{{inner}}}", line)
    length, name, index, sign, text = match.groups()
    if name in values.causes:
        raise values.causes[name]
    known = values.first(name)
    if index and name not in ("BASH_SOURCE",):
        listed = values.words(name)
        if length and listed is not None:
            return str(len(listed))
        at = index[1:-1]
        known = dict(enumerate(listed or [])).get(int(at)) if at.isdigit() else None
        if listed is not None and at == "*" and not (sign or text):
            return (values.get("IFS", " ") or "\0")[0].strip("\0").join(listed)
        if listed and not at.isdigit():
            raise unknown(f"${{{inner}}}", line)
    if sign and sign.strip(":") in "-=+?":
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
    if known is None:
        raise unknown(name, line)
    if length:
        return str(len(known))
    if not sign:
        if text:
            raise unknown(f"${{{inner}}}", line)
        return known
    if sign in (",,", "^^"):
        return known.lower() if sign == ",," else known.upper()
    if sign[0] == "/":
        parts = re.fullmatch(r"((?:\\.|[^/\\])*)(?:/(.*))?", text, re.S)
        wanted, by = (
            (expand(part or "", values, line) for part in parts.groups()) if parts else ("", "")
        )
        if not wanted or re.search(r"[*?\[]", wanted) or wanted[0] in "#%":
            raise unknown(f"${{{inner}}}", line)
        return known.replace(wanted, by, -1 if sign == "//" else 1)
    pattern = expand(text, values, line)
    cuts = list(range(len(known) + 1))
    if sign.startswith("#"):
        cuts = [i for i in cuts if fits(known[:i], pattern)]
        return known[(max if len(sign) == 2 else min)(cuts, default=0) :]
    cuts = [i for i in cuts if fits(known[i:], pattern)]
    return known[: (min if len(sign) == 2 else max)(cuts, default=len(known))]


def is_literal(word: str) -> bool:
    """Return whether quotes take the meaning from every sign of a glob."""
    return re.fullmatch(r"'[^']*'|\"[^\"]*\"", word) is not None


def fits(text: str, pattern: str) -> bool:
    """Return whether a glob of bash's, with `*`, `?` and sets as `[a-z]`, matches the whole text."""

    def regex(part: str) -> str:
        pieces = re.split(rf"({SET})", part)
        plain = (re.escape(one).replace(r"\?", ".") for one in pieces[::2])
        return "".join(a + b for a, b in zip(plain, [*pieces[1::2], ""], strict=True))

    first, *rest = map(regex, pattern.split("*"))
    # The first place for a part between two `*` is as good as any, so none is tried again.
    glob = first + "".join(f"(?>.*?{part})" for part in rest[:-1])
    return re.fullmatch(glob + "".join(f".*{part}" for part in rest[-1:]), text, re.S) is not None


def _value(name: str, values: Variables, line: str) -> str:
    if name in values.causes:
        raise values.causes[name]
    known = values.first(name)
    if known is None:
        raise unknown(f"${name}" if name.isdigit() else name, line)
    return known


def unknown(name: str, line: str, why: str = "has no value in the script") -> Unknown:
    set_name = re.match(rf"(?:export\s+|local\s+)?({NAME})=", line)
    fix = name if re.fullmatch(NAME, name) else set_name[1] if set_name else ""
    rule = f"{name} {why}, and nothing is executed"
    error = Unknown(
        str(
            bad_value(
                "SCRIPT",
                shown(line),
                rule,
                f"--set {fix}=VALUE" if fix else "write the value into the script",
            )
        )
    )
    error.name = fix
    return error


def shown(line: str) -> str:
    """Return the start of a command, in one line, for an error."""
    return " ".join(line.split())[:80]


def _arithmetic(text: str, values: Variables, line: str) -> str:
    """Compute integer arithmetic of bash: + - * / % and brackets."""
    given = re.sub(rf"\$({NAME}|\{{[^{{}}]*\}})", lambda m: f"({expand(m[0], values, line)})", text)
    plain = re.sub(rf"\b{NAME}", lambda m: f"({_value(m[0], values, line)})", given)
    try:
        return str(_compute(ast.parse(plain.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
        raise unknown(f"$(({text}))", line, "is arithmetic that cannot be computed here") from None


def _compute(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return int(_OPERATORS[type(node.op)](_compute(node.left), _compute(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_compute(node.operand)
    raise ValueError
