"""The kinds of entries in the table that have more than a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

_Row = TypeVar("_Row")
PREFIX = "actor_rollout_ref."
"""verl puts this before the sections actor, ref, rollout and model."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A key with an equal here."""

    to: str
    """The key of millrace."""
    value: Callable[[Any], Any] | None = None
    """The translation of the value. `values.DROP` is the default, and `values.SILENT` sets nothing.

    Raises ValueError with the rule and the fix for a value that has no equal.
    """
    note: str = ""
    """What differs, for the user."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A key of a feature that millrace does not have."""

    feature: str
    instead: str = "leave the key out"
    off: tuple[Any, ...] = ()
    """Values that leave the feature off. Empty and false values do too, unless `mapping` is set."""
    mapping: bool = False
    """Whether the key is a mapping with free names: then each named value is a setting."""

    def allows(self, value: Any) -> bool:
        """Return whether `value` leaves the feature off. True is not 1, and false is not 0."""
        if self.mapping:
            return value is None or value == {}
        return not value or any(type(value) is type(o) and value == o for o in self.off)


def by_name(rows: Mapping[str, _Row]) -> dict[str, _Row]:
    """Return the row of each name in the keys. Patterns that fit every section come last."""
    found = {name: row for keys, row in rows.items() for name in _names(keys)}
    return dict(sorted(found.items(), key=lambda item: item[0][0] == "*"))


def _names(keys: str) -> Iterator[str]:
    """Yield the words of a text. `a.{b,c}` stands for a.b and a.c."""
    for word in keys.split():
        head, _, rest = word.partition("{")
        choices, _, tail = rest.partition("}")
        for choice in choices.split(","):
            yield from _names(f"{head}{choice}{tail}") if rest else [word]
