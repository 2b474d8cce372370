"""Source specs, `kind:NAME?param=value&param=value`.

The defaults of a dataclass give the types of the parameters.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import MISSING, fields
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from millrace.errors import ConfigError

Wrong = partial[ConfigError]
"""Makes the error of a source from a rule and a fix."""


def nearest(name: str, known: Iterable[str], form: str = "{}") -> str:
    """Return the fix of an error message: the known name closest to `name`, in `form`.

    If no name is close, return the first few known names.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return form.format(close[0])
    return (
        ("one of " + ", ".join(names[:12]) + (", ..." if len(names) > 12 else ""))
        if names
        else "none is known"
    )


def split_spec(wrong: Wrong, spec: str) -> tuple[str, dict[str, str]]:
    """Return (NAME, parameters) of `kind:NAME?param=value`.

    Raise ConfigError if the query is not a list of param=value.
    """
    name, _, query = spec.partition(":")[2].partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        rule = f"the text after ? must be param=value pairs joined by & ({error})"
        raise wrong(rule, f"{spec.partition('?')[0]}?size=500") from None
    params = dict(pairs)
    if len(params) < len(pairs):
        raise wrong("a parameter is given twice", "leave one of them out")
    return name, params


def typed(wrong: Wrong, given: dict[str, str], shape: type) -> dict[str, Any]:
    """Return `given` with each value in the type of the default in the dataclass `shape`.

    Raise ConfigError with the parameter's name if it is unknown or its value has another type.
    """
    known, found = {f.name: f for f in fields(shape)}, dict[str, Any]()
    if unknown := next((name for name in given if name not in known), ""):
        rule = f"unknown parameter {unknown!r}; known are {', '.join(known)}"
        raise wrong(rule, nearest(unknown, known))
    for name, text in given.items():
        default, made = known[name].default, known[name].default_factory
        if default is MISSING:
            default = None if made is MISSING else made()
        try:
            found[name] = _value(default, text)
        except ValueError:
            rule = f"{name}={text!r} is not a value of type {type(default).__name__}"
            raise wrong(rule, f"{name}={default}") from None
    return found


def _value(default: Any, text: str) -> Any:
    """Return `text` as a value of `default`'s type. Raise ValueError if that fails."""
    if isinstance(default, bool):
        return (
            text.lower() in ("true", "1")
            if text.lower() in ("true", "1", "false", "0")
            else _refuse(text)
        )
    if isinstance(default, int):
        return int(text)
    if isinstance(default, float):
        return float(text) if math.isfinite(float(text)) else _refuse(text)
    if isinstance(default, str):
        return text
    if isinstance(default, tuple | list):
        value = json.loads(text)
        return type(default)(value) if isinstance(value, list) else _refuse(text)
    if default is None:
        return json.loads(text) if text[:1] in "[{-0123456789" and text else text
    return _refuse(text)


def _refuse(text: str) -> Any:
    raise ValueError(text)


def refused(wrong: Wrong, error: Exception) -> ConfigError:
    """Return the ConfigError for parameters of the right types that the generator refuses."""
    rule = f"refused by the generator: {error or type(error).__name__}"
    return wrong(rule, "a value that holds to this rule")
