"""Settings in verl's words become settings of millrace."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from millrace.config.explain import all_keys
from millrace.config.layers import Setting
from millrace.errors import ConfigError, bad_value
from millrace.extras.verl.absent import ABSENT
from millrace.extras.verl.joined import JOINED, Joined, join
from millrace.extras.verl.kinds import PREFIX, Absent, Mapped
from millrace.extras.verl.mapped import MAPPED, PATTERNS
from millrace.extras.verl.needless import NEEDLESS
from millrace.extras.verl.values import DROP, NO_LOGGERS, SILENT


@dataclass(frozen=True, slots=True)
class Note:
    """The translation of one verl setting."""

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


def spelling(
    layers: Iterable[Iterable[Setting]], native: Callable[[str], bool]
) -> tuple[list[list[Setting]], list[str], list[str]]:
    """Translate each layer. Return also the notes of a run, and a line for each setting of verl's."""
    ours, notes = translate(layers, native)
    return ours, _summary(notes), [str(note) for note in notes]


def _summary(notes: Sequence[Note]) -> list[str]:
    """Return the notes of a run on these settings, and on loggers that millrace does not have."""
    if not notes:
        return []
    mapped = sum(bool(note.became) for note in notes)
    counts = f"translated {mapped}, needless {len(notes) - mapped}"
    lines = [f"settings in verl's words: {counts}. --dry-run lists them"]
    for key, value in (note.setting for note in notes):
        names = [value] if isinstance(value, str) else value
        if key == "trainer.logger" and (other := sorted({*(names or ())} & NO_LOGGERS)):
            lines.append(
                f"trainer.logger: millrace has no {', '.join(other)}. RUN/metrics.jsonl has all "
                "figures, and trainer.logger=[tensorboard] writes them for TensorBoard"
            )
    return lines


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


def is_unknown(key: str, native: Callable[[str], bool]) -> bool:
    """Return whether neither verl nor millrace has a key."""
    return entry(key, native) is None and not native(key.removeprefix(PREFIX))


def _is_shallow(key: str, native: Callable[[str], bool]) -> bool:
    """Return whether the error for unknown keys of millrace can name the key as it is spelled."""
    top, section = key.partition(".")[0], key.rpartition(".")[0]
    return not key.startswith(PREFIX) and (not native(top) or native(section))


def unknown(key: str, value: Any) -> ConfigError:
    """Return the error for an unknown key. It suggests names of the key's own section alone."""
    short = key.removeprefix(PREFIX)
    section, dot, _ = short.rpartition(".")
    tables = (MAPPED, ABSENT, NEEDLESS, JOINED, dict(all_keys()))
    names = {name.removeprefix(PREFIX) for table in tables for name in table}
    own = [name for name in names if name.rpartition(".")[:2] == (section, dot) and "*" not in name]
    near = difflib.get_close_matches(short, own, 1, 0.9)
    top, tail = f"{short.partition('.')[0]}.", f".{short.rpartition('.')[2]}"
    near = near or [n for n, _ in all_keys() if dot and n.startswith(top) and n.endswith(tail)]
    prefix = key[: len(key) - len(short)]
    fix = f"{prefix}{near[0]}, or " if near else ""
    rule = "no such key: neither verl nor millrace has it"
    return bad_value(key, value, rule, f"{fix}leave it out, as `import-verl --drop` does")


def translate(
    layers: Iterable[Iterable[Setting]], native: Callable[[str], bool]
) -> tuple[list[list[Setting]], list[Note]]:
    """Return each layer in millrace's words, and notes on what became of verl's settings.

    Of a key of verl's, the value in the last layer counts, as in Hydra. `native` says whether a
    dotted key is millrace's own. A key that nobody knows stays as it is, without the prefix. Raises
    ConfigError with one line for each setting of a feature that millrace does not have, for each
    value without an equal, and for each two settings of one layer that contradict each other.
    """
    given = [_last_values(layer) for layer in layers]
    last = {_name(key): i for i, layer in enumerate(given) for key in layer}
    work = _Work(native, [[] for _ in given])
    whole = _last_values((_name(key), v) for layer in given for key, v in layer.items())
    errors: list[ConfigError] = []
    work.joined = join(whole, last, errors)
    spelled = {_name(key): key for layer in given for key in layer}
    for error in errors:  # these have the tables' names, without the prefix
        key, equals, rest = str(error).partition(" = ")
        work.errors.append(ConfigError(f"{spelled.get(key, key)}{equals}{rest}"))
    for at, layer in enumerate(given):
        for key, value in layer.items():
            row = entry(key, native)
            if row is None and is_unknown(key, native) and not _is_shallow(key, native):
                work.errors.append(unknown(key, value))
                continue
            if row is None or last[_name(key)] == at:
                work.add(at, (key, value), row)
    errors = [*work.errors, *(_refused(row, found) for row, found in work.absent.items())]
    errors += [error for layer in work.ours for error in _contradictions(layer)]
    if errors:
        raise ConfigError("\n".join(map(str, errors)))
    return [[ours for _, ours in layer] for layer in work.ours], work.notes


def _last_values(layer: Iterable[Setting]) -> dict[str, Any]:
    """Return the last value of each key, in the order of these last values."""
    values: dict[str, Any] = {}
    for key, value in layer:
        values.pop(key, None)
        values[key] = value
    return values


def _name(key: str) -> str:
    """Return the name under which the tables know a key: without the prefix, or with it."""
    tables = (MAPPED, ABSENT, NEEDLESS)
    return key if any(key in table for table in tables) else key.removeprefix(PREFIX)


@dataclass(slots=True)
class _Work:
    """The translations of the settings so far."""

    native: Callable[[str], bool]
    ours: list[list[tuple[Setting, Setting]]]
    """For each layer: settings in verl's words with their translations."""
    notes: list[Note] = field(default_factory=list)
    errors: list[ConfigError] = field(default_factory=list)
    absent: dict[Absent, list[Setting]] = field(default_factory=dict)
    joined: dict[str, Joined] = field(default_factory=dict)

    def add(self, at: int, theirs: Setting, row: Mapped | Absent | str | None) -> None:
        """Translate a setting of layer `at`."""
        key, value = theirs
        short = key.removeprefix(PREFIX)
        if short in JOINED or short in self.joined:
            if short in self.joined:
                layer, result, why = self.joined[short]
                self.ours[layer] += [(theirs, ours) for ours in result]
                why = why or ("" if result else "it is what happens here anyway")
                self.notes.append(Note(theirs, tuple(result), why))
        elif isinstance(row, Mapped):
            self._map(at, theirs, row)
        elif isinstance(row, Absent):
            if row.allows(value):
                self.notes.append(Note(theirs, why=f"this value does not use {row.feature}"))
            else:
                self.absent.setdefault(row, []).append(theirs)
        elif row is not None:
            self.notes.append(Note(theirs, why=row))
        else:
            self.ours[at].append((theirs, (short, value)))

    def _map(self, at: int, theirs: Setting, row: Mapped) -> None:
        key, value = theirs
        short = key.removeprefix(PREFIX)
        try:
            result = row.value(value) if row.value else value
        except ValueError as error:
            rule, _, fix = str(error).partition("; ")
            self.errors.append(bad_value(key, value, rule, fix))
            return
        rest = next((short.removeprefix(p[:-1]) for p, r in PATTERNS.items() if r is row), "")
        to = row.to.replace("*", rest)
        if result is SILENT:
            self.notes.append(Note(theirs, why=row.note or "this value decides nothing"))
        elif result is DROP:
            self._reset(at, short, to)
            self.notes.append(Note(theirs, why=f"it leaves {to} at its default"))
        else:
            self.ours[at].append((theirs, (to, result)))
            if (to, result) != (short, value) or type(result) is not type(value):
                self.notes.append(Note(theirs, ((to, result),), row.note))

    def _reset(self, at: int, short: str, to: str) -> None:
        """Remove a key of millrace, and all names under it, from the layers before `at`.

        What another key of verl's became stays.
        """

        def goes(theirs: str, key: str) -> bool:
            own = theirs == short or theirs.startswith(f"{short}.") or theirs not in MAPPED
            return own and (key == to or key.startswith(f"{to}."))

        for layer in self.ours[:at]:
            layer[:] = [
                (theirs, ours)
                for theirs, ours in layer
                if not goes(theirs[0].removeprefix(PREFIX), ours[0])
            ]


def _contradictions(layer: Iterable[tuple[Setting, Setting]]) -> Iterator[ConfigError]:
    """Yield an error for each key of millrace that two settings of a layer set differently."""
    first: dict[str, tuple[Setting, Any]] = {}
    for theirs, (to, value) in layer:
        (key, before), other = first.setdefault(to, (theirs, value))
        if key != theirs[0] and other != value:
            meant = f", here {_text(other)} and {_text(value)}" if before == theirs[1] else ""
            rule = f"contradicts {key} = {before!r}, because both set {to}{meant}"
            yield bad_value(*theirs, rule, "leave one of the two out")


_SHOWN = 5
"""Keys of one feature that its error names, besides the last one."""


def _refused(row: Absent, settings: Sequence[Setting]) -> ConfigError:
    """Return the error for all settings of one feature."""
    *others, (key, value) = settings
    hidden = len(others) - _SHOWN
    first = "".join(f"{name} = {other!r}, " for name, other in others[:_SHOWN])
    first += f"{hidden} more such keys, " if hidden > 0 else ""
    rule = f"millrace does not have {row.feature}"
    return ConfigError(f"{first}{bad_value(key, value, rule, row.instead)}")


def text_of(key: str, value: Any) -> str:
    """Return a setting as an override."""
    return f"{key}={_text(value)}"


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(_text, value))}]" if isinstance(value, list | tuple) else str(value)
