"""The base class of every section of the configuration."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError, to_jsonable_python

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
