"""The kinds of entries in the table that have more than a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    instead: str
    off: tuple[Any, ...] = ()
    """Values that leave the feature off. Empty and false values do too, unless `mapping` is set."""
    mapping: bool = False
    """Whether the key is a mapping with free names: then each named value is a setting."""

    def allows(self, value: Any) -> bool:
        """Return whether `value` leaves the feature off. True is not 1, and false is not 0."""
        if self.mapping:
            return value is None or value == {}
        return not value or any(type(value) is type(o) and value == o for o in self.off)
