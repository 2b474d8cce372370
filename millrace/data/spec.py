"""Source specs, `kind:NAME?param=value&param=value`.

The defaults of a dataclass give the types of the parameters.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from typing import Any
from urllib.parse import parse_qsl

from millrace.errors import ConfigError, bad_value


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


def split_spec(key: str, spec: str) -> tuple[str, dict[str, str]]:
    """Return (NAME, parameters) of `kind:NAME?param=value`.

    Raise ConfigError if the query is not a list of param=value.
    """
    name, _, query = spec.partition(":")[2].partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        rule = f"the text after ? must be param=value pairs joined by & ({error})"
        raise bad_value(key, spec, rule, f"{spec.partition('?')[0]}?size=500") from None
    params = dict(pairs)
    if len(params) < len(pairs):
        raise bad_value(key, spec, "a parameter is given twice", "leave one of them out")
    return name, params


def typed(key: str, spec: str, given: dict[str, str], shape: type) -> dict[str, Any]:
    """Return `given` with each value in the type of the default in the dataclass `shape`.

    Raise ConfigError with the parameter's name if it is unknown or its value has another type.
    """
    known = {f.name: f for f in fields(shape)}
    unknown = [name for name in given if name not in known]
    if unknown:
        rule = f"unknown parameter {unknown[0]!r}; known are {', '.join(known)}"
        raise bad_value(key, spec, rule, nearest(unknown[0], known))
    return {name: _convert(key, spec, known[name], text) for name, text in given.items()}


def _convert(key: str, spec: str, field: Field[Any], text: str) -> Any:
    default = field.default
    if default is MISSING:
        default = None if field.default_factory is MISSING else field.default_factory()
    try:
        return _value(default, text)
    except ValueError:
        kind = type(default).__name__
        raise bad_value(
            key,
            spec,
            f"{field.name}={text!r} is not a value of type {kind}",
            f"{field.name}={default}",
        ) from None


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


def refused(key: str, spec: str, error: Exception) -> ConfigError:
    """Return the ConfigError for parameters of the right types that the generator refuses."""
    return bad_value(
        key,
        spec,
        f"refused by the generator: {error or type(error).__name__}",
        "a value that holds to this rule",
    )
