"""Settings in verl's words become settings of millrace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from millrace.config.verl.absent import ABSENT
from millrace.config.verl.joined import JOINED, Joined, join
from millrace.config.verl.kinds import PREFIX, Absent, Mapped
from millrace.config.verl.mapped import MAPPED, PATTERNS
from millrace.config.verl.needless import NEEDLESS
from millrace.config.verl.values import DROP
from millrace.errors import ConfigError, bad_value

Setting = tuple[str, Any]
"""A dotted key and its value."""


@dataclass(frozen=True, slots=True)
class Note:
    """What became of one setting of verl's."""

    setting: Setting
    became: tuple[Setting, ...] = ()
    """The settings of millrace. It is empty for a needless setting."""
    why: str = ""
    """The reason why a setting is needless, or what differs."""

    @property
    def theirs(self) -> str:
        return text_of(*self.setting)

    def __str__(self) -> str:
        if not self.became:
            return f"{self.theirs} is needless: {self.why}"
        ours = " ".join(text_of(*setting) for setting in self.became)
        return f"{self.theirs} -> {ours}" + (f" ({self.why})" if self.why else "")


def entry(key: str, native: Callable[[str], bool]) -> Mapped | Absent | str | None:
    """Return what the table says of a key of verl's: a needless key's entry is its reason.

    The result is None if `native` says that the key is millrace's own, and if nobody knows it.
    Whole names come first, then patterns. millrace's own keys come before needless patterns.
    """
    short = key.removeprefix(PREFIX)
    for name in (key, short):
        for table in (MAPPED, ABSENT, NEEDLESS):
            if name in table:
                return table[name]
        if name in JOINED:
            return JOINED[name]
    for table in (PATTERNS, ABSENT, NEEDLESS):
        for pattern, row in table.items():
            if fnmatchcase(short, pattern):
                return row
        if table is ABSENT and native(short):
            return None
    return None


def translate(
    settings: Iterable[Setting], native: Callable[[str], bool]
) -> tuple[list[Setting], list[Note]]:
    """Return the settings in millrace's words, and a note for each that verl spells differently.

    `native` says whether a dotted key is millrace's own. A key that nobody knows stays as it is,
    without the prefix. Raises ConfigError with one line for each setting of a feature that
    millrace does not have, and for each value without an equal.
    """
    given = list(settings)
    ours: list[Setting] = []
    notes: list[Note] = []
    errors: list[ConfigError] = []
    absent: dict[Absent, list[Setting]] = {}
    joined: Joined = {}
    try:
        joined = join({k.removeprefix(PREFIX): v for k, v in given})
    except ConfigError as error:
        errors.append(error)
    for key, value in given:
        row, short = entry(key, native), key.removeprefix(PREFIX)
        if short in JOINED:
            if short in joined:
                result, why = joined[short]
                ours += result
                notes.append(_note((key, value), result, why))
        elif isinstance(row, Mapped):
            try:
                result = _mapped(row, short, value)
            except ValueError as error:
                rule, _, fix = str(error).partition("; ")
                errors.append(bad_value(key, value, rule, fix))
                continue
            ours += result
            if result != [(short, value)] or type(result[0][1]) is not type(value):
                notes.append(_note((key, value), result, row.note))
        elif isinstance(row, Absent):
            if row.allows(value):
                notes.append(Note((key, value), why=f"without {row.feature}, as always here"))
            else:
                absent.setdefault(row, []).append((key, value))
        elif row is not None:
            notes.append(Note((key, value), why=row))
        else:
            ours.append((short, value))
    errors += [_refused(row, found) for row, found in absent.items()]
    if errors:
        raise ConfigError("\n".join(map(str, errors)))
    return ours, notes


def _refused(row: Absent, settings: Sequence[Setting]) -> ConfigError:
    """Return the error for all settings of one feature."""
    *others, (key, value) = settings
    first = "".join(f"{name} = {other!r}, " for name, other in others)
    rule = f"millrace does not have {row.feature}"
    return ConfigError(f"{first}{bad_value(key, value, rule, row.instead)}")


def _mapped(row: Mapped, short: str, value: Any) -> list[Setting]:
    """Return the setting of millrace, or none. `*` in its key is the rest of verl's key."""
    result = row.value(value) if row.value else value
    rest = next((short.removeprefix(p[:-1]) for p, r in PATTERNS.items() if r is row), "")
    return [] if result is DROP else [(row.to.replace("*", rest), result)]


def _note(setting: Setting, result: Sequence[Setting], why: str) -> Note:
    return Note(setting, tuple(result), why or ("" if result else "it is what happens here anyway"))


def text_of(key: str, value: Any) -> str:
    """Return a setting as an override."""
    return f"{key}={_text(value)}"


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(_text, value))}]" if isinstance(value, list | tuple) else str(value)
