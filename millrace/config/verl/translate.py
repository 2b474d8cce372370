"""Settings in verl's words become settings of millrace."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from millrace.config.verl import PREFIX
from millrace.config.verl.absent import ABSENT
from millrace.config.verl.joined import JOINED, join
from millrace.config.verl.kinds import Absent, Mapped
from millrace.config.verl.mapped import MAPPED, PATTERNS
from millrace.config.verl.needless import NEEDLESS
from millrace.config.verl.values import DROP
from millrace.errors import ConfigError, bad_value

Setting = tuple[str, Any]
"""A dotted key and its value."""


@dataclass(frozen=True, slots=True)
class Note:
    """What became of one setting of verl's."""

    kind: Literal["mapped", "needless"]
    setting: Setting
    result: str
    """mapped: the settings of millrace. needless: the reason."""
    caveat: str = ""
    """What differs."""

    def __str__(self) -> str:
        key, value = self.setting
        text = f"{key}={shown(value)} "
        text += f"-> {self.result}" if self.kind == "mapped" else f"is needless: {self.result}"
        return f"{text} ({self.caveat})" if self.caveat else text


def entry(key: str, native: Callable[[str], bool]) -> Mapped | Absent | str | None:
    """Return what the table says of a key of verl's: a needless key's entry is its reason.

    The result is None if `native` says that the key is millrace's own, and if nobody knows it.
    Whole names come first, then millrace's own keys, then patterns.
    """
    short = key.removeprefix(PREFIX)
    for name in (key, short):
        for table in (MAPPED, ABSENT, NEEDLESS):
            if name in table:
                return table[name]  # type: ignore[no-any-return]
        if name in JOINED:
            return JOINED[name]
    if native(short):
        return None
    for table in (PATTERNS, ABSENT, NEEDLESS):
        for pattern, row in table.items():
            if fnmatchcase(short, pattern):
                return row  # type: ignore[no-any-return]
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
    for key, value in given:
        row = entry(key, native)
        if key.removeprefix(PREFIX) in JOINED:
            continue
        if isinstance(row, Mapped):
            try:
                result = _mapped(row, key, value)
            except ValueError as error:
                rule, _, fix = str(error).partition("; ")
                errors.append(bad_value(key, value, rule, fix))
                continue
            ours += result
            if result != [(key, value)]:
                notes.append(_note(key, value, result, row.note))
        elif isinstance(row, Absent):
            if value and value not in row.off:
                rule = f"millrace does not have {row.feature}"
                errors.append(bad_value(key, value, rule, row.instead))
            else:
                notes.append(Note("needless", (key, value), f"{row.feature}: off, as here"))
        elif row is not None:
            notes.append(Note("needless", (key, value), row))
        else:
            ours.append((key.removeprefix(PREFIX), value))
    try:
        joined = join({k.removeprefix(PREFIX): v for k, v in given})
    except ConfigError as error:
        errors.append(error)
    else:
        for key, value in given:
            if (short := key.removeprefix(PREFIX)) in joined:
                result, why = joined[short]
                ours += result
                notes.append(_note(key, value, result, why))
    if errors:
        raise ConfigError("\n".join(map(str, errors)))
    return ours, notes


def _mapped(row: Mapped, key: str, value: Any) -> list[Setting]:
    result = row.value(value) if row.value else value
    rest = key.removeprefix(PREFIX).removeprefix(row.to.removesuffix("*"))
    rest = re.sub(r"^.*\.vllm\.", "", rest)
    return [] if result is DROP else [(row.to.replace("*", rest), result)]


def _note(key: str, value: Any, result: Sequence[Setting], why: str) -> Note:
    if not result:
        return Note("needless", (key, value), why or "it is what happens here anyway")
    text = " ".join(f"{name}={shown(v)}" for name, v in result)
    return Note("mapped", (key, value), text, why)


def shown(value: Any) -> str:
    """Return a value as an override has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(shown, value))}]" if isinstance(value, list | tuple) else str(value)
