"""The base class of every section of the configuration."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError


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

    def check(self) -> None:
        """Raise ConfigError if keys of this section contradict each other."""

    def check_all(self) -> None:
        """Check every section inside this one, then this one."""
        for name in type(self).model_fields:
            if isinstance(inner := getattr(self, name), Section):
                inner.check_all()
        self.check()


Home = AfterValidator(os.path.expanduser)
"""Reads ~ as the user's home: a shell leaves it as it is behind the = of an override."""

Folder = AfterValidator(
    lambda path: os.path.abspath(home) if os.path.isdir(home := os.path.expanduser(path)) else home
)
"""Reads a folder's path as an absolute one: a process in another folder reads it too."""

OneOrMore = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)

Sources = Annotated[tuple[str, ...], OneOrMore]
"""One source, or a list of sources."""
