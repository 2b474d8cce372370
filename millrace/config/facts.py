"""Facts about a key, as metadata of its field: the choices that read it, and its fate on a resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Choice = dict[str, tuple[Any, ...]]
"""The values of each key with which another key is read. All of them are necessary.

A name that begins with a dot is that of a key in the same section.
"""

Unless = Callable[[Any, Any, str], bool]
"""Whether a change is harmless, from the configurations (now, before) and the key."""

STREAM = "it identifies each prompt by its position in the data"
"""The reason why a resume keeps the keys that decide the order of the prompts."""


def _never(now: Any, before: Any, key: str) -> bool:
    return False


@dataclass(frozen=True)
class Choices:
    """The value is one of the names, or a user's `path.py:name` or `module:name`."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def _known(self, value: str) -> str:
        if value not in self.names and ":" not in value:
            names = "one of the names, or " if any(self.names) else ""
            raise PydanticCustomError("choice", "must be {names}path.py:name", {"names": names})
        where, _, name = value.rpartition(":")
        if not where.endswith(".py"):
            return value
        # A process in another folder reads the run's config.yaml: a resume, an export, a node of Ray.
        return f"{Path(where).expanduser().resolve()}:{name}"


class ReadWith:
    """The run reads the key only with one of the choices.

    With another choice, a value other than the default is an error.
    """

    def __init__(self, *choices: Choice) -> None:
        self.choices = choices

    def choices_in(self, section: str) -> tuple[Choice, ...]:
        """Return the choices with whole names of keys. `section` is the prefix of the key."""
        return tuple(
            {f"{section}{k}" if k.startswith(".") else k: v for k, v in choice.items()}
            for choice in self.choices
        )


class Switch:
    """If a layer sets the key to another value, the keys that need it may stay.

    A recipe for vLLM then runs on a CPU with rollout.engine=torch alone: its keys of vLLM change speed
    and memory, and no results.
    """


class NoEffectOnWeights:
    """A resumed run may change the key while it trains the steps of the journal again."""


@dataclass(frozen=True)
class _Fate:
    """The fate of another value on a resume."""

    why: str
    unless: Unless = _never
    which: str = "another value"


class Fixed(_Fate):
    """A resume refuses another value: it shaped the samples in flight, or the weights."""

    def __str__(self) -> str:
        return f"A resume refuses {self.which}: {self.why}."


class FixedRows(_Fate):
    """A resume refuses other rows. Without digests of rows in the checkpoint, it needs the value."""

    def __str__(self) -> str:
        return f"A resume refuses other rows, but not other names of their files: {self.why}."


class Past(_Fate):
    """Another value has no effect after a resume, and a note says so."""

    def __str__(self) -> str:
        return f"{self.which.capitalize()} has no effect on a resume: {self.why}."


@dataclass(frozen=True, slots=True)
class Compared:
    """A resume compares what the key stands for: the models, or the components of the reward."""

    rule: str

    def __str__(self) -> str:
        return f"A resume refuses {self.rule}."
