"""Source specs, `kind:NAME?param=value&param=value`, and their parameters, typed by a dataclass's defaults."""

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
    """The known name that looks most like `name`, in `form`; else the first few of them; for the fix of an error message."""
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
    """(NAME, parameters) of `kind:NAME?param=value`. Raises ConfigError for a query that is no list of param=value."""
    name, _, query = spec.partition(":")[2].partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        rule = f"what follows ? must be param=value pairs joined by & ({error})"
        raise bad_value(key, spec, rule, f"{spec.partition('?')[0]}?size=500") from None
    params = dict(pairs)
    if len(params) < len(pairs):
        raise bad_value(key, spec, "a parameter is given twice", "leave one of them out")
    return name, params


def typed(key: str, spec: str, given: dict[str, str], shape: type) -> dict[str, Any]:
    """`given` with values of the types that the fields of the dataclass `shape` have by default.

    Raises ConfigError naming the parameter for an unknown one, and for a value of another type.
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
    """`text` as a value of `default`'s type. Raises ValueError."""
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
    """The ConfigError for parameters that have the right types, but that the generator itself refuses."""
    return bad_value(
        key,
        spec,
        f"refused by the generator: {error or type(error).__name__}",
        "a value that holds to this rule",
    )
