"""The overrides in a launch script of verl's, read without running the script.

It understands assignments, `${NAME}` with defaults such as `${NAME:-value}`, arithmetic `$(( ))`,
arrays, line continuations, quotes and comments. Nothing is executed: a variable that only a command
or a condition can set is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from millrace.errors import ConfigError, bad_value
from millrace.extras.verl.words import NAME, Variables, expand, unknown

_OVERRIDE = re.compile(r"^(?:\+{0,2}[A-Za-z_][\w.]*=|~[A-Za-z_][\w.]*)")
_ASSIGNMENT = re.compile(rf"^{NAME}\+?=")
_OPENING = ("if", "for", "while", "until", "case")
_CLOSING = ("fi", "done", "esac", "}")
_SETTERS = ("let", "mapfile", "read", "readarray", "unset")
"""Commands that change variables, as `(( ))` and `printf -v` do."""
_PROGRAMS = (
    ("fully_async", "verl/fully_async_ppo_trainer"),
    ("one_step_off", "verl/one_step_off_ppo_trainer"),
    ("main_ppo", "verl/ppo_trainer"),
    ("main_dapo", "verl/ppo_trainer"),
)
"""A part of the name of verl's program, and the recipe with its defaults."""


@dataclass(slots=True)
class Script:
    """The overrides of a launch script, and the recipe with its defaults."""

    overrides: list[str] = field(default_factory=list)
    """`key=value`, in their order, with all variables replaced."""
    base: str = ""
    """The packaged recipe with the defaults of the program that the script starts, or empty."""
    config: str = ""
    """The value of --config-name, or empty."""


@dataclass(frozen=True, slots=True)
class _Command:
    """A command with overrides."""

    line: str
    base: str
    """The recipe of the program of verl's that it starts, or empty."""
    config: str
    overrides: list[str]
    listed: bool
    """Whether it has no program: it is a line in a list of overrides."""


def read(text: str, variables: Mapping[str, str]) -> Script:
    """Return the overrides of a script.

    `variables` are the values of names that the script does not set itself. Raises ConfigError for
    all variables without a value that the command needs, for arithmetic that cannot be computed,
    for an open quote, and for overrides of several commands.
    """
    values = Variables(variables)
    found: list[_Command] = []
    depth = 0
    for whole, conditional in commands(text):
        line = re.sub(r"^(?:then|else|do)\s+", "", whole)
        if depth:  # the pattern of a case
            line = re.sub(r"^\(?[^()=\s]+(?:\s*\|\s*[^()=\s]+)*\)\s*", "", line) or line
        first = line.split()[0]
        depth += (
            (first in _OPENING) - (first in _CLOSING) + bool(re.search(r"(?:^|[\s)])\{$", line))
        )
        if not _assign(values, line, branch=conditional or depth > 0):
            found += _command(line, values)
    return _chosen(found)


def _chosen(found: Sequence[_Command]) -> Script:
    """Return the overrides of the one command that starts a training."""
    listed = [command for command in found if command.listed]
    others = [command for command in found if not command.listed]
    started = [command for command in others if command.base] or others
    if len(started) > 1:
        rule = f"the script has {len(started)} commands with overrides, and a recipe is for one"
        fix = "a copy of the script with one of them"
        raise bad_value("SCRIPT", _shown(started[1].line), rule, fix)
    if not started:
        return Script([item for command in listed for item in command.overrides])
    if listed:
        rule = (
            "bash does not pass this line on: a comment or a missing \\ ends the command above it"
        )
        raise bad_value("SCRIPT", _shown(listed[0].line), rule, "leave the line out, or join it")
    return Script(started[0].overrides, started[0].base, started[0].config)


def _assign(values: Variables, line: str, *, branch: bool) -> bool:
    """Keep the variables that a command sets. Return whether it does nothing else."""
    body = re.sub(r"^(?:export|local|readonly|declare|typeset)(?:\s+-\w+)*\s+", "", line)
    words = words_of(body)
    if match := re.match(rf"^({NAME})(\+?)=\((.*)\)$", body, re.S):
        _assign_array(values, match, line, branch=branch)
    elif words and all(_ASSIGNMENT.match(word) for word in words):
        for word in words:
            name, _, text = word.partition("=")
            _assign_text(values, name, text, line, branch=branch)
    elif line.startswith(":"):
        for word in words[1:]:
            _default(word, values, line)
    else:
        for name in _changed(line):
            values.forget(name, _branched(name, line) if "{" in line else unknown(name, line))
        return line.startswith(("((", "{")) or words[0] in _SETTERS
    return True


def _changed(line: str) -> list[str]:
    """Return the variables that a command changes in a way that only bash knows."""
    names: list[str] = []
    if line.startswith("(("):
        names += re.findall(rf"({NAME})\s*(?:[-+*/%]?=(?!=)|\+\+|--)", line)
        names += re.findall(rf"(?:\+\+|--)({NAME})", line)
    elif re.match(rf"(?:function\s+)?(?:{NAME}\s*\(\)\s*)?\{{\s", line):  # on one line
        names += re.findall(rf"(?:[\s;{{])({NAME})\+?=", line)
    elif line.split()[0] in _SETTERS:
        names += re.findall(rf"(?<![-\w])({NAME})", line.partition(" ")[2])
    elif match := re.match(rf"printf\s+-v\s+({NAME})", line):
        names.append(match[1])
    return names


def _assign_array(values: Variables, match: re.Match[str], line: str, *, branch: bool) -> None:
    """Keep the words of an array. An array that is set inside `if` or a loop stays unknown."""
    name, added, text = match.groups()
    if branch:
        values.forget(name, _branched(name, line))
        return
    try:
        items = [item for word in words_of(text) for item in _items(word, values, line)]
    except ConfigError as error:
        values.forget(name, error)  # it is raised where an override needs the name
        return
    values.arrays[name] = [*(values.arrays.get(name, []) if added else []), *items]
    values.causes.pop(name, None)


def _items(word: str, values: Variables, line: str) -> list[str]:
    """Return what bash makes of one word: the words of an array, or one word."""
    match = re.fullmatch(rf'"?\$\{{({NAME})\[[@*]\](:?[-+].*)?\}}"?', word, re.S)
    if not match:
        return [expand(word, values, line)]
    name, default = match.groups()
    known = values.arrays.get(name)
    if name in values.causes or (known is None and not default):
        raise values.causes.get(name) or unknown(name, line)
    sign, text = (default.lstrip(":")[0], default.lstrip(":")[1:]) if default else ("", "")
    if sign == "+" or (sign == "-" and not known):
        # bash takes the text if the array has words (+), or if it has none (-).
        if sign == "+" and not known:
            return []
        return [item for one in words_of(text) for item in _items(one, values, line)]
    return known or []


def _default(word: str, values: Variables, line: str) -> None:
    """Keep the value that `: ${NAME:=value}` sets."""
    try:
        expand(word, values, line)
    except ConfigError as error:
        if match := re.match(rf'"?\$\{{({NAME})', word):
            values.forget(match[1], error)


def _assign_text(values: Variables, name: str, text: str, line: str, *, branch: bool) -> None:
    """Keep the value of a variable. A value that only a command or a branch knows stays unknown.

    A value from the caller wins: it is the answer to an error of this script.
    """
    added = name.endswith("+")
    name = name.removesuffix("+")
    if name in values and name not in values.script:
        return
    words = words_of(text)
    try:
        if branch:
            raise _branched(name, line)
        if "`" in text:
            raise unknown(name, line)
        before = values.get(name, "") if added else ""
        values[name] = before + (expand(words[0], values, line) if words else "")
        values.script.add(name)
        values.causes.pop(name, None)
    except ConfigError as error:
        values.forget(name, error)  # it is raised where an override needs the name


def _command(line: str, values: Variables) -> list[_Command]:
    """Return a command with its overrides, if it has any."""
    words = words_of(line)
    while words and _ASSIGNMENT.match(words[0]):  # the environment of one command
        words.pop(0)
    words = words[: words.index("|") if "|" in words else None]
    if not words or words[0] in ("echo", "printf"):
        return []
    programs = [word for word in words if not _is_override(word.lstrip("'\""))]
    bases = [base for part, base in _PROGRAMS if any(part in _program(w) for w in programs)]
    overrides: list[str] = []
    errors: dict[str, None] = {}
    certain, before = bool(bases), ""
    for word in words:
        if not re.fullmatch(r"[0-9&]*>>?", before):  # else it is the file of a redirection
            try:
                overrides += _overrides(word, values, line)
            except ConfigError as error:
                errors[str(error)] = None
                certain |= _is_override(word.lstrip("'\""))
        before = word
    if errors and (certain or overrides):
        raise ConfigError("\n".join(errors))
    if not overrides:
        return []
    names = re.findall(r"\s--config-name(?:=|\s+)(\S+)", line)
    config = expand(names[-1], values, line) if names else ""
    return [_Command(line, (bases or [""])[0], config, overrides, _is_override(words[0]))]


def _program(word: str) -> str:
    """Return a module's name, or the end of a Python file's path; else an empty string."""
    if word.endswith(".py"):  # the folder says which main_ppo.py it is
        return "/".join(word.split("/")[-2:])
    return word if re.fullmatch(rf"{NAME}(?:\.{NAME})*", word) else ""


def _overrides(word: str, values: Variables, line: str) -> list[str]:
    """Return the overrides in a word. Raises ConfigError if it may have some without a value."""
    # Without quotes, bash splits the value.
    whole = re.fullmatch(rf"\$(?:{NAME}|\{{{NAME}(?::?[-+=][^{{}}]*)?\}})", word)
    try:
        items = _items(word, values, line)
    except ConfigError:
        if whole or "[@]" in word or "[*]" in word or _is_override(word.lstrip("'\"")):
            raise
        return []
    items = items[0].split() if whole else items
    return [item for item in items if _is_override(item)]


def _is_override(word: str) -> bool:
    """Return whether a word is `section.key=value`, or Hydra's form of it with + or ~."""
    return bool(_OVERRIDE.match(word)) and "." in word.partition("=")[0]


def _branched(name: str, line: str) -> ConfigError:
    rule = (
        f"{name} is set inside `if`, `case`, a loop, a function or a condition, and nothing is "
        "executed"
    )
    return bad_value("SCRIPT", _shown(line), rule, f"--set {name}=VALUE")


def _shown(line: str) -> str:
    return " ".join(line.split())[:80]


def commands(text: str) -> list[tuple[str, bool]]:
    """Return the script's commands, and whether each stands after `&&` or `||`.

    Comments and the texts of here-documents are left out. A line with a continuation, an open
    bracket or an open quote goes on in the next one.
    """
    found: list[tuple[str, bool]] = []
    pending, ends = "", list[str]()
    for raw in text.splitlines():
        if ends:
            ends = ends[1:] if raw.strip() == ends[0] else ends
            continue
        bare = _without_comment(pending + raw)
        if continued := re.fullmatch(r"((?:.*[^\\])?(?:\\\\)*)\\[ \t]*", bare, re.S):
            pending = continued[1]
        elif _is_open(bare):
            pending = f"{bare}\n"
        else:
            ends = _here_documents(bare)
            found += _commands(bare)
            pending = ""
    if _is_open(pending):
        shown = pending.strip().splitlines()[0][:80]
        raise bad_value("SCRIPT", shown, "has an open quote or bracket", "close it")
    return [*found, *_commands(pending)]


def _here_documents(line: str) -> list[str]:
    """Return the words that end the here-documents of a line."""
    starts = [at for at, char, bare in _scan(line, _ALL) if bare and char == "<"]
    document = re.compile(r"(?<!<)<<-?\s*([\"']?)(\w+)\1")
    return [match[2] for at in starts if (match := document.match(line, at))]


def _scan(text: str, brackets: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the position, the character and whether it is bare, for each character and the end.

    A bare character stands outside of quotes and brackets. A bracket itself is not bare. `brackets`
    has the kinds that count, each with its two sides.
    """
    quote, depth, escaped = "", 0, False
    for at, char in enumerate(text):
        if quote or escaped:
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and quote == '"' and not escaped
            yield at, char, False
            continue
        escaped = char == "\\"
        quote = char if char in "'\"" else ""
        if char in brackets:
            depth += 1 if brackets.index(char) % 2 == 0 else -1
            yield at, char, False
        else:
            yield at, char, not quote and depth <= 0
    yield len(text), "", not quote and depth <= 0


_ALL = "()[]{}"


def _commands(text: str) -> list[tuple[str, bool]]:
    """Split a line at `;`, `&`, `&&` and `||` outside of quotes and brackets."""
    parts, start, conditional = [], 0, False
    for at, char, bare in _scan(text, _ALL):
        double = text[at : at + 2]
        single = char == ";" or (char == "&" and text[at - 1 : at] not in (">", "<", "|"))
        single = single and double != "&>"
        if bare and at >= start and (single or double in ("&&", "||")):
            sign = double if double in ("&&", "||") else char
            parts.append((text[start:at].strip(), conditional))
            start, conditional = at + len(sign), len(sign) == 2
    parts.append((text[start:].strip(), conditional))
    return [(part, after) for part, after in parts if part]


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


def words_of(text: str) -> list[str]:
    """Split a line at spaces outside of quotes and of `$(( ))`. Quotes stay."""
    words, start = [], 0
    for at, char, bare in _scan(text, _ALL):
        if at == len(text) or (bare and char.isspace()):
            words.append(text[start:at])
            start = at + 1
    return [word for word in words if word]
