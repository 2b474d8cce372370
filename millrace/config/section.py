"""The base class of every section of the configuration, and the facts about a key on its field."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationInfo,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema, to_jsonable_python

from millrace.errors import bad_value

Rule = tuple[object, str, str, str]
"""Whether keys break a rule, the key whose value is wrong, the rule, and the fix."""


class Section(BaseModel):
    """A section: frozen keys under one name."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _only_numbers_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true, false and 010 where only a number fits.

        pydantic would read them as 1, 0 and 10, and YAML reads 010 as 8.
        """
        kind = cls.model_fields[info.field_name or ""].annotation
        kinds = {kind, *get_args(kind)}
        number = bool(kinds & {int, float}) and bool not in kinds
        if isinstance(value, bool) and number:
            raise PydanticCustomError("bool_for_a_number", "must be a number, not true or false")
        if isinstance(value, str) and number and re.match(r"[-+]?0\d", value):
            raise PydanticCustomError("leading_zero", "must be a number that begins with no zero")
        return value

    def value_of(self, key: str) -> Any:
        """Return the value of a dotted key."""

        def inner(of: Any, name: str) -> Any:
            return of[name] if isinstance(of, dict) else getattr(of, name)

        return functools.reduce(inner, key.split("."), self)

    def rules(self, here: str) -> Iterator[Rule]:
        """Yield the rules among keys of this section, which they name without `here`, its prefix."""
        return iter(())

    def check(self, here: str = "") -> None:
        """Raise ConfigError if keys of this section, or of one inside it, contradict each other."""
        for name in type(self).model_fields:
            inner = getattr(self, name)
            parts = inner.items() if isinstance(inner, dict) else ()
            sections = {name: inner} | {f"{name}.{key}": part for key, part in parts}
            for key, section in sections.items():
                if isinstance(section, Section):
                    section.check(f"{here}{key}.")
        self.refuse(self.rules(here), here)

    def refuse(self, rules: Iterator[Rule], here: str = "") -> None:
        """Raise ConfigError for the first rule that is broken."""
        for broken, key, rule, fix in rules:
            if broken:
                value = to_jsonable_python(self.value_of(key), fallback=repr)
                raise bad_value(f"{here}{key}", value, rule, fix)


Home = AfterValidator(os.path.expanduser)
"""Reads ~ as the user's home: a shell leaves it as it is behind the = of an override."""

Folder = AfterValidator(
    lambda path: os.path.abspath(home) if os.path.isdir(home := os.path.expanduser(path)) else home
)
"""Reads a folder's path as an absolute one: a process in another folder reads it too."""

OneOrMore = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)

Sources = Annotated[tuple[str, ...], OneOrMore]
"""One source, or a list of sources."""


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
