"""The overrides in a launch script of verl's, read without running the script.

`shell` walks through the script. Of the command that starts verl, each word after the program is an
override, an option of Hydra's, or an error that names it. The words before the program start it,
and do not matter here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from shlex import quote

from millrace.errors import ConfigError, bad_value
from millrace.extras.verl.kinds import PREFIX
from millrace.extras.verl.lines import before_pipe, commands, words_of
from millrace.extras.verl.shell import Shell, items
from millrace.extras.verl.words import NAME, Variables, expand, shown

_OVERRIDE = re.compile(r"(?:\+{0,2}[A-Za-z_][\w./@:-]*=|~[A-Za-z_])")
_PROGRAMS = (
    ("fully_async", "verl/fully_async_ppo_trainer"),
    ("one_step_off", "verl/one_step_off_ppo_trainer"),
    ("main_ppo", "verl/ppo_trainer"),
    ("main_dapo", "verl/ppo_trainer"),
)
"""A part of the name of verl's program, and the recipe with its defaults."""
_NAME_OPTIONS, _PATH_OPTIONS = ("--config-name", "-cn"), ("--config-path", "-cp")
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>?|<)&?(.*)")


@dataclass(slots=True)
class Script:
    """The overrides of a launch script, and the recipe with its defaults."""

    overrides: list[str] = field(default_factory=list)
    """Hydra's words, in their order, with all variables replaced."""
    base: str = ""
    """The packaged recipe with the defaults of the program that the script starts, or empty."""
    config: str = ""
    """The value of --config-name, or empty."""
    folder: str = ""
    """The value of --config-path, or empty."""
    program: str = ""
    """The program that the script starts, if it is not one that has a recipe."""
    sourced: list[str] = field(default_factory=list)
    """Commands that read another file, which millrace does not."""


@dataclass(slots=True)
class _Start(Script):
    """A command with overrides."""

    line: str = ""
    listed: bool = False
    """Whether it has no program: it is a line in a list of overrides."""
    others: list[str] = field(default_factory=list)
    """The words after the program that Hydra does not read."""
    errors: dict[str, None] = field(default_factory=dict)
    """Why some of its words are unknown."""


def read(
    text: str,
    variables: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
    replaced: Collection[str] = (),
) -> Script:
    """Return the overrides of a script.

    `variables` are the answers of the caller, which win over the script. `environment` has the
    variables that the script finds. `replaced` has the keys whose values do not matter. Raises ConfigError for each variable without a value that the
    command needs, for a word that is neither an override nor an option, for an open quote, and for
    overrides of several commands.
    """
    lines = "\n".join(line for line, _ in commands(text))  # without comments
    unused = [name for name in variables if not re.search(rf"\b{name}\b", lines)]
    if unused:
        rule = "the script has no variable of this name"
        used = sorted({*re.findall(rf"(?<![\w.]){NAME}(?![\w.])", lines)})
        near = get_close_matches(unused[0], used, 1, 0.8)
        fix = f"--set {near[0]}={variables[unused[0]]}" if near else "a name that the script uses"
        raise bad_value("--set", unused[0], rule, fix)
    values = Variables(variables, environment or {})
    is_list = not any(_base(word) for line, _ in commands(text) for word in re.split(r"\s", line))
    found: list[_Start] = []
    unclear: dict[ConfigError, None] = {}
    shell = Shell(values, lambda line: _starts(line, values, found, unclear, replaced))
    try:
        shell.walk(text)
        if not found:
            shell.walk_uncalled()
    except RecursionError:
        rule = "has more brackets, quotes or conditions inside each other than can be read"
        raise bad_value(
            "SCRIPT", shown(text), rule, "fewer of them, or a list of overrides"
        ) from None
    if unclear and not found:  # the program may be in one of these
        raise ConfigError("\n".join(map(str, unclear)))
    script = _chosen(found, _loose(text) if is_list else [])
    script.sourced = shell.sourced
    return script


def _loose(text: str) -> list[str]:
    """Return the lines of a list of overrides that bash would take for variables or options."""
    words = [words_of(line) for line, _ in commands(text)]
    alone = [one[0] for one in words if len(one) == 1]
    return [
        word
        for word in alone
        if word.startswith("-")
        or (
            (match := re.match(rf"({NAME})=", word)) and not re.search(rf"\$\{{?{match[1]}\b", text)
        )
    ]


def _chosen(found: Sequence[_Start], loose: Sequence[str]) -> Script:
    """Return the overrides of the one command that starts a training."""
    listed = [start for start in found if start.listed]
    others = [start for start in found if not start.listed]
    started = [start for start in others if start.base] or others
    if len({(start.base, *start.overrides) for start in started}) > 1:
        rule = f"the script has {len(started)} commands with overrides, and a recipe is for one"
        fix = "a copy of the script with one of them, or --set for the branch that is meant"
        raise bad_value("SCRIPT", shown(started[1].line), rule, fix)
    script = started[0] if started else _Start()
    if not started:
        for start in listed:
            script.others += start.others
            script.errors |= start.errors
        _sort([*(word for start in listed for word in start.overrides), *loose], script)
    if script.errors:
        raise ConfigError("\n".join(script.errors))
    if started and listed:
        rule = (
            "bash does not pass this line on: a comment or a missing \\ ends the command above it"
        )
        raise bad_value("SCRIPT", shown(listed[0].line), rule, "leave the line out, or join it")
    if script.others and (script.base or script.program or not started):
        rule = "is neither an override, key=value, nor an option that millrace reads"
        words = ", ".join(script.others[1:4])
        rule += f"; nor are {words}" if words else ""
        raise bad_value("SCRIPT", script.others[0], rule, "leave it out of the script")
    return script


def _starts(
    line: str,
    values: Variables,
    found: list[_Start],
    unclear: dict[ConfigError, None],
    replaced: Collection[str],
) -> None:
    """Keep a command with overrides."""
    words = words_of(before_pipe(line))
    while words and re.match(rf"{NAME}\+?=", words[0]):  # the environment of one command
        words.pop(0)
    if not words or words[0] in ("echo", "printf"):
        return
    words = [part for word in words for part in _parts(word, values, line)]
    given = [_program_text(word, values) for word in words]
    texts = [" ".join(given[1:])] if words[0] == "eval" else given
    for text in texts:
        if " " in text and any(_base(part) for part in text.split()):
            for inner, _ in commands(text):  # such as bash -c "python3 -m verl.trainer.main_ppo"
                if inner.strip() != line.strip():
                    _starts(inner, values, found, unclear, replaced)
            return
    known = [i for i, text in enumerate(given) if _base(text)]
    named = [i for i in known if _module(given[i], given[i - 1 : i])]
    at = next(iter(named or known), None)
    start = _Start(line=line, base=_base(given[at]) if at is not None else "")
    if at is None:
        programs = [i for i, text in enumerate(given) if _module(text, given[i - 1 : i])]
        at = programs[-1] if programs else None
        start.program = given[at] if at is not None else ""
        start.listed = at is None and _is_override(words[0])
        at = -1 if start.listed else at or 0
    tail, skipped = list[str](), False
    for word in words[at + 1 :]:
        if skipped:  # the file of a redirection
            skipped = False
            continue
        if redirection := _REDIRECTION.fullmatch(word):
            skipped = not redirection[1]
            continue
        try:
            tail += items(word, values, line)
        except ConfigError as error:
            key = word.lstrip("'\"") if _is_dotted(word.lstrip("'\"")) else ""
            start.overrides += [key] if key else []
            if short(key) not in replaced:
                fix = "write the value into the script"
                name = key.lstrip("+").partition("=")[0]
                text = str(error).replace(fix, f"--set {name}=VALUE" if name else fix)
                start.errors |= dict.fromkeys(text.splitlines())
    _sort(tail, start)
    if start.base or start.listed or any(_is_dotted(word) for word in start.overrides):
        found.append(start)
    else:
        commanding = words if words[0] == "eval" or "-c" in words else words[:1]
        listed = [word.strip('"${[@]}') for word in words if "[@]" in word or word in commanding]
        unclear |= dict.fromkeys(values.causes[name] for name in listed if name in values.causes)


def short(override: str) -> str:
    """Return the key of an override, without verl's prefix."""
    return override.lstrip("+").partition("=")[0].removeprefix(PREFIX)


def _parts(word: str, values: Variables, line: str) -> list[str]:
    """Return the words of a reference that has the program, each in quotes, or the word itself."""
    try:
        found = items(word, values, line) if word.lstrip('"')[:1] == "$" else []
    except ConfigError:
        return [word]
    return [quote(item) for item in found] if any(_base(item) for item in found) else [word]


def _program_text(word: str, values: Variables) -> str:
    """Return a word as the search for the program sees it."""
    try:
        return expand(word, values, word)
    except ConfigError:
        return word.strip("'\"")


def _module(word: str, before: Sequence[str]) -> bool:
    """Return whether a word is a Python file, or the module after -m."""
    return (word.endswith(".py") and "=" not in word) or (
        list(before) == ["-m"] and re.fullmatch(rf"{NAME}(?:\.{NAME})*", word) is not None
    )


def _base(word: str) -> str:
    """Return the recipe of a program of verl's, or an empty string."""
    name = word.strip("'\"")
    if name.endswith(".py") and "=" not in name:  # the folder says which main_ppo.py it is
        name = "/".join(name.split("/")[-2:])
    elif not re.fullmatch(rf"{NAME}(?:\.{NAME})*", name):
        return ""
    return next((base for part, base in _PROGRAMS if part in name), "")


def _sort(words: Sequence[str], start: _Start) -> None:
    """Put each word where it belongs: overrides, the configuration's name and folder, or others."""
    left = [word for word in words if word]
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name in (*_NAME_OPTIONS, *_PATH_OPTIONS):
            value = value if equals else left.pop(0) if left else ""
            if name in _NAME_OPTIONS:
                start.config = value
            else:
                start.folder = value
        elif _is_override(word):
            start.overrides.append(word)
        else:
            start.others.append(word)


def _is_override(word: str) -> bool:
    """Return whether a word is Hydra's: `key=value`, also with + or ++, a group's choice, or ~key."""
    return _OVERRIDE.match(word.lstrip("'\"")) is not None


def _is_dotted(word: str) -> bool:
    return _is_override(word) and "." in word.partition("=")[0]
