"""A walk through a launch script, as bash takes it, with nothing executed.

It follows assignments, arrays, functions, and the branches of `if`, `case`, `&&` and `||` whose
tests have known values. A variable that changes in a branch, a loop or a command that nobody can
decide has no value: its error names the line, and the variable that decides it.
"""

from __future__ import annotations

import operator
import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.errors import ConfigError, bad_value
from millrace.extras.verl.lines import commands, words_of
from millrace.extras.verl.words import (
    NAME,
    SET,
    Unknown,
    Variables,
    check_size,
    expand,
    fits,
    is_literal,
    shown,
    unknown,
)

_ASSIGNMENT = re.compile(rf"^{NAME}\+?=")
_FUNCTION = re.compile(rf"(?:function\s+({NAME})\s*(?:\(\s*\))?|({NAME})\s*\(\s*\))\s*")
_SETTERS = ("let", "mapfile", "read", "readarray", "unset")
"""Commands that change variables, as `(( ))` and `printf -v` do."""
_SPLIT = re.compile(rf"\$(?:{NAME}|\{{{NAME}(?::?[-+=][^{{}}]*)?\}})")
"""A reference without quotes, whose value bash splits into words."""
_OVERRIDE = re.compile(r"\+{0,2}[\w.]+=")
_START = re.compile(r"\+{0,2}ray_kwargs\.")
"""An override that says how Ray starts its workers, which is needless here."""
_DEEPEST = 8
"""Calls of functions inside each other. One that calls itself is walked through once."""

_Answer = tuple[bool | None, ConfigError | None]
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
_UNKNOWN: _Answer = (None, None)


@dataclass(slots=True)
class _Frame:
    """An open `if`, `case`, loop or group."""

    kind: str
    line: str
    runs: bool | None = True
    """Whether its present branch runs. None means that nobody knows."""
    earlier: bool | None = False
    """Whether a branch before the present one ran."""
    cause: ConfigError | None = None
    """Why nobody knows."""
    subject: str | None = None
    """The value that `case` compares."""
    waits: bool = False
    """Whether the pattern of a branch comes next."""

    def enter(self, test: bool | None) -> None:
        """Enter the next branch, whose own test has this answer."""
        self.runs = _and(test, _not(self.earlier))
        self.earlier = _not(_and(_not(self.earlier), _not(test)))


def _not(known: bool | None) -> bool | None:
    return None if known is None else not known


def _and(*known: bool | None) -> bool | None:
    return False if False in known else None if None in known else True


class Shell:
    """The state of a walk. `start` gets each command that may start a program."""

    def __init__(self, values: Variables, start: Callable[[str], None]) -> None:
        self._values, self._start = values, start
        self._frames: list[_Frame] = []
        self._functions: dict[str, str] = {}
        self._body: list[str] | None = None
        """The lines of a function that is being defined, after its name."""
        self._open = 0
        self._status: bool | None = True
        self._cause: ConfigError | None = None
        self._calls: list[str] = []
        """The functions that are being walked through."""
        self._locals = set[str]()
        """The variables of the innermost function alone."""
        self._returned = False
        self.sourced: list[str] = []
        """Commands that read another file, which may set any variable."""

    def walk(self, text: str) -> None:
        """Walk through commands. Raises ConfigError if the start of a program cannot be known."""
        for line, sign in commands(text):
            if self._returned:
                return
            if self._body is None:
                self._step(line, sign)
            else:
                self._define(line, sign)

    def walk_uncalled(self) -> None:
        """Walk through the functions that the script defines, as if each were called."""
        for body in list(self._functions.values()):
            self.walk(body)

    def _runs(self) -> bool | None:
        return _and(*(frame.runs for frame in self._frames))

    def _define(self, line: str, sign: str) -> None:
        """Keep a line of a function's body, up to the closing bracket."""
        assert self._body is not None
        self._open += bool(re.search(r"(?:^|[\s)])\{$", line)) - (line.split()[0] == "}")
        if self._open > 0:
            starts = len(self._body) == 1 and line == "{"
            joined = f"{sign} {line}" if sign and len(self._body) > 1 else line
            if sign and len(self._body) > 1:
                self._body[-1] += f" {joined}"
            elif not starts:
                self._body.append(joined)
            return
        name, *lines = self._body
        self._keep(name, "\n".join(lines))
        self._body = None

    def _step(self, line: str, sign: str) -> None:
        """Take one command, which may open, change or close a frame."""
        after = {"&&": self._status, "||": _not(self._status)}.get(sign, True)
        frame = self._frames[-1] if self._frames else None
        if frame and frame.waits and not line.startswith("esac"):
            if match := re.match(r"\(?\s*([^()]*?)\)\s*(.*)", line, re.S):
                frame.waits = False
                frame.enter(_matches(frame.subject, match[1], self._values, line))
                frame.line = f"{frame.line.partition(' in ')[0]} in {match[1]})"
                if match[2]:
                    self._step(match[2], "")
            return
        first, _, rest = line.partition(" ") if " " in line else line.partition("\n")
        rest = rest.strip()
        if first == ";;":
            if frame and frame.kind == "case":
                frame.waits = True
        elif first in ("fi", "done", "esac", "}"):
            if frame:
                self._frames.pop()
        elif first in ("if", "while", "until"):
            self._frames.append(_Frame(first, line))
            self._step(rest, "")
        elif first in ("for", "select"):
            self._frames.append(_Frame(first, line))
            if match := re.match(rf"({NAME})(?:\s+in\b(.*))?", rest, re.S):
                self._values.forget(match[1], self._branched(match[1], line))
                self._status = self._has_words(match[2], line)
        elif first == "case":
            self._open_case(line, rest)
        elif first in ("then", "else", "elif", "do") and frame:
            self._next_branch(frame, first, line)
            if rest:
                self._step(rest, "")
        elif first == "{" and not line.endswith("}"):
            self._frames.append(_Frame("{", line, after))
            if rest:
                self._step(rest, "")
        elif match := _FUNCTION.match(line):
            self._begin(match[1] or match[2], line[match.end() :].strip())
        elif after is not False and self._runs() is not False:
            self._take(line, after)

    def _has_words(self, text: str | None, line: str) -> bool | None:
        """Return whether a `for` has a word. Without `in`, it takes those of `$@`."""
        try:
            listed = words_of(text) if text is not None else ["$@"]
            return bool([item for word in listed for item in items(word, self._values, line)])
        except ConfigError:
            return None

    def _open_case(self, line: str, rest: str) -> None:
        word, _, branches = (rest if " in" in rest else f"{rest} in").partition(" in")
        frame = _Frame("case", line, waits=True)
        try:
            frame.subject = expand(word.strip(), self._values, line)
        except ConfigError as error:
            frame.cause = error
        self._frames.append(frame)
        if branches.strip():
            self._step(branches.strip(), "")

    def _next_branch(self, frame: _Frame, word: str, line: str) -> None:
        """Decide whether the next part of an `if` or a loop runs."""
        if word == "elif":
            frame.runs, frame.line = _not(frame.earlier), line
        elif word == "else":
            frame.enter(test=True)
        elif word == "then":
            frame.enter(self._status)
            frame.cause = frame.cause or self._cause
        else:
            frame.runs = False if self._status is (frame.kind == "until") else None

    def _begin(self, name: str, body: str) -> None:
        """Begin the definition of a function. One on a single line is whole."""
        if match := re.fullmatch(r"\{\s(.*)\}|(\(.*\))", body, re.S):
            self._keep(name, match[1] or match[2])
        else:
            self._body, self._open = [name], int(body[:1] == "{")
            self._body += [body[1:].strip()] if body[1:].strip() else []

    def _keep(self, name: str, body: str) -> None:
        if self._runs() is not False:
            self._functions[name] = body

    def _take(self, line: str, after: bool | None) -> None:
        """Take a command that opens nothing. `after` is what decides it on its own line."""
        words = words_of(line)
        group = re.fullmatch(r"\{\s(.*)\}|\((?!\()(.*)\)", line, re.S)
        name = words[0] if words else ""
        before = self._cause if after is None else None
        depth = len(self._frames)
        self._frames.append(_Frame("{", line, after, cause=before))
        status: bool | None = None
        cause: ConfigError | None = None
        if group:
            kept = self._values.kept()
            self.walk(group[1] or group[2] or "")
            if group[2]:  # a subshell changes no variable of the script
                self._values.restore(kept)
            status, cause = self._status, self._cause
        elif name in self._functions:
            self._call(name, words[1:], line)
        elif name == "cd" and len(words) == 2:
            self._enter_folder(words[1], line)
            status = True
        elif name == "return" and self._calls:
            self._returned = self._runs() is True
        elif name in ("source", "."):
            self.sourced.append(line)
        elif self._assign(line):
            status = None if "$(" in line or "`" in line else True
        else:
            status, cause = _judge(line, self._values)
            if status is None:
                self._start(line)
        del self._frames[depth:]
        self._status = status if after is True else None
        self._cause = before or cause

    def _enter_folder(self, word: str, line: str) -> None:
        try:
            folder = posixpath.join(self._values.get("PWD", ""), expand(word, self._values, line))
            if self._runs() is None:
                raise self._branched("PWD", line)
            self._values["PWD"] = posixpath.normpath(folder)
        except ConfigError as error:
            self._values.forget("PWD", error)

    def _call(self, name: str, words: Sequence[str], line: str) -> None:
        """Walk through the body of a function, with its arguments."""
        if name in self._calls or len(self._calls) >= _DEEPEST:
            return
        before = self._values.arguments
        self._calls.append(name)
        kept, others = self._values.kept(), self._locals
        self._locals = set()
        given = [item for word in words for item in items(word, self._values, line)]
        self._values.arguments, frames = given, self._frames
        self._frames = [_Frame("{", line, self._runs(), cause=self._reason().cause)]
        self.walk(self._functions[name])
        self._values.arguments, self._frames = before, frames
        self._values.restore(kept, self._locals)
        self._locals, self._returned = others, False
        self._calls.pop()

    def _reason(self) -> _Frame:
        """Return the frame because of which nobody knows whether a command runs."""
        unsure = [frame for frame in self._frames if frame.runs is None]
        return unsure[0] if unsure else _Frame("", "")

    def _branched(self, name: str, line: str, *, array: bool = False) -> Unknown:
        """Return the error for a variable that changes where nobody knows whether it runs."""
        frame = self._reason()
        rule = (
            f"{name} is set inside `if`, `case`, a loop or a condition, and nothing is executed"
            if not array
            else f"{name} is a list of words for verl's program, and this line inside "
            f"`{shown(frame.line)}` changes it"
        )
        answer = f'{name}="WORDS", all of its words' if array else f"{name}=VALUE"
        decides = getattr(frame.cause, "name", "")
        fix = f"--set {answer}"
        if decides and decides != name:
            fix = f"--set {decides}=VALUE, which decides `{shown(frame.line)}`; or {fix}"
        error = Unknown(str(bad_value("SCRIPT", shown(line), rule, fix)))
        error.name = decides or name
        return error

    def _assign(self, line: str) -> bool:
        """Keep the variables that a command sets. Return whether it does nothing else."""
        values = self._values
        body = re.sub(r"^(?:export|local|readonly|declare|typeset)(?:\s+-\w+)*\s+", "", line)
        words = words_of(body)
        if body != line:  # `local a=1 b` gives b no value
            if self._calls and not re.match("export|readonly", line):
                self._locals |= {word.partition("=")[0] for word in words}
            words = [word for word in words if not re.fullmatch(NAME, word)]
        if match := re.match(rf"^({NAME})(\+?)=\((.*)\)$", body, re.S):
            self._assign_array(match, line)
        elif words and all(_ASSIGNMENT.match(word) for word in words):
            for word in words:
                name, _, text = word.partition("=")
                self._assign_text(name, text, line)
        elif words[:2] == ["set", "--"] and self._runs() is None:
            values.causes["@"] = self._branched("$@", line)
        elif words[:2] == ["set", "--"]:
            values.arguments = [item for word in words[2:] for item in items(word, values, line)]
        elif words[:1] == ["shift"]:
            n = "".join(words[1:2]) or "1"
            if not n.isdecimal():
                values.causes["@"] = unknown("$@", line)
            values.arguments = values.arguments[int(n) if n.isdecimal() else 0 :]
        elif line.startswith(":"):
            for word in words[1:]:
                self._default(word, line)
        else:
            changed = _changed(line)
            for name in changed:
                values.forget(name, unknown(name, line))
            return bool(changed) and not line.startswith("printf")
        return True

    def _assign_array(self, match: re.Match[str], line: str) -> None:
        """Keep the words of an array, unless the caller gave them."""
        name, added, text = match.groups()
        values = self._values
        if name in values.given:
            return
        unsure = self._runs() is None
        if added and name in values.causes and not unsure:
            return
        try:
            found = [item for word in words_of(text) for item in items(word, values, line)]
            before = values.words(name) or []
            check_size(found, line)
            if unsure and all(_START.match(word) for word in [*before, *found]):
                return
            if unsure:
                raise self._branched(name, line, array=True)
        except ConfigError as error:
            values.forget(name, self._branched(name, line, array=True) if unsure else error)
            return
        values.arrays[name] = [*(before if added else []), *found]
        values.pop(name, None)
        values.causes.pop(name, None)

    def _assign_text(self, name: str, text: str, line: str) -> None:
        """Keep the value of a variable. A value that only a command or a branch knows stays unknown.

        A value from the caller wins: it is the answer to an error of this script.
        """
        values, added = self._values, name.endswith("+")
        name = name.removesuffix("+")
        if name in values.given:
            return
        words = words_of(text)
        try:
            if self._runs() is None:
                raise self._branched(name, line)
            if added and name in values.causes:
                return
            value = expand(words[0], values, line) if words else ""
            home = re.match(r"~(?=/|$)", text) and values.get("HOME")
            values.put(name, home + value[1:] if home else value, added=added)
        except ConfigError as error:
            values.forget(name, error)  # it is raised where an override needs the name

    def _default(self, word: str, line: str) -> None:
        """Keep the value that `: ${NAME:=value}` sets."""
        try:
            expand(word, self._values, line)
        except ConfigError as error:
            if match := re.match(rf'"?\$\{{({NAME})', word):
                self._values.forget(match[1], error)


def _judge(line: str, values: Variables) -> _Answer:
    """Return whether a command that is not executed succeeds."""
    text = line.strip()
    if text.startswith("! "):
        known, cause = _judge(text[2:], values)
        return (None if known is None else not known), cause
    if match := re.fullmatch(r"\(\(\s*(.*?)\s*(==|!=|<=|>=|<|>)\s*(.*?)\s*\)\)", text):
        return _caught([f"$(({match[1]}))", _SIGNS[match[2]], f"$(({match[3]}))"], values, line)
    if match := re.fullmatch(r"\[\[\s+(.*)\s+\]\]|\[\s+(.*)\s+\]|test\s+(.*)", text, re.S):
        return _any(words_of("".join(filter(None, match.groups()))), values, line)
    first = text.split()[0] if text else ""
    if first == "getopts" and not values.arguments:
        return False, None
    return (first != "false", None) if first in (*_SUCCEED, "false") else _UNKNOWN


def _any(words: Sequence[str], values: Variables, line: str) -> _Answer:
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


def _caught(words: Sequence[str], values: Variables, line: str) -> _Answer:
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


def _matches(subject: str | None, patterns: str, values: Variables, line: str) -> bool | None:
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


def _changed(line: str) -> list[str]:
    """Return the variables that a command changes in a way that only bash knows."""
    names: list[str] = []
    if line.startswith("(("):
        names += re.findall(rf"({NAME})\s*(?:[-+*/%]?=(?!=)|\+\+|--)", line)
        names += re.findall(rf"(?:\+\+|--)({NAME})", line)
    elif line.split()[:1] and line.split()[0] in _SETTERS:
        names += re.findall(rf"(?<![-\w])({NAME})", line.partition(" ")[2])
    elif match := re.match(rf"(?:printf\s+-v\s+({NAME})|({NAME})\[[^]]*\]\+?=)", line):
        names.append(match[1] or match[2])
    return names


def items(word: str, values: Variables, line: str) -> list[str]:
    """Return what bash makes of one word: the words of an array or of `$@`, or one word."""
    if whole := re.fullmatch(r'"?\$(?:[@*]|\{[@*](?::([1-9]))?\})"?', word):
        if "@" in values.causes:
            raise values.causes["@"]
        return values.arguments[int(whole[1] or 1) - 1 :]
    match = re.fullmatch(rf'"?\$\{{({NAME})\[[@*]\](:?[-+].*)?\}}"?', word, re.S)
    if not match:
        text = expand(word, values, line, "\0")
        return _split(text) if not _SPLIT.fullmatch(word) else [p for p in text.split("\0") if p]
    name, default = match.groups()
    known = values.words(name)
    if name in values.causes or (known is None and not default):
        rule = f"{name} has no value in the script, and is a list of words for verl's program"
        fix = f'--set {name}="WORDS", all of its words'
        raise values.causes.get(name) or bad_value("SCRIPT", shown(line), rule, fix)
    sign, text = (default.lstrip(":")[0], default.lstrip(":")[1:]) if default else ("", "")
    if sign == "+" or (sign == "-" and not known):
        # bash takes the text if the array has words (+), or if it has none (-).
        if sign == "+" and not known:
            return []
        return [item for one in words_of(text) for item in items(one, values, line)]
    return (
        known or []
        if word[:1] == '"'
        else [part for item in known or [] for part in _split(re.sub(r"\s", "\0", item))]
    )


def _split(text: str) -> list[str]:
    """Split a text at "\0" if each part is an override. A list with spaces is meant as it is."""
    parts = [part for part in text.split("\0") if part]
    return parts if all(map(_OVERRIDE.match, parts[1:])) else [text.replace("\0", " ")]
