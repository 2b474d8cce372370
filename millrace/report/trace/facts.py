"""The facts of an event as JSON that any reader of a trace takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from millrace.codec import sendable

_MOST_ITEMS, _MOST_TEXT, _MOST_KEY = 1024, 500, 100
_MOST_JSON = 500
"""Bytes of facts that go into the trace as they are. Larger ones are shortened."""
_AS_ZERO, _LARGE = bytes.maketrans(b"123456789", b"000000000"), b"0" * 19
"""So many digits may be a whole number of more than 64 bits. Readers of JSON refuse or round it."""


def as_json(args: dict[str, Any]) -> Raw:
    return Raw(msgspec.json.encode(args))


def key_of(key: str) -> str:
    """Return a key that a trace can hold."""
    return key if len(key) <= _MOST_KEY and key.isascii() else sendable(key[:_MOST_TEXT])


def args_of(facts: Mapping[str, Any]) -> Raw | None:
    """Return the facts as JSON, without those that a trace cannot hold."""
    if not facts:
        return None
    try:
        data = msgspec.json.encode(facts)
    except (TypeError, ValueError, OverflowError, RecursionError):
        data = b""
    if 0 < len(data) < _MOST_JSON and _LARGE not in data.translate(_AS_ZERO):
        return Raw(data)
    shown = {sendable(str(name)): _plain(value) for name, value in facts.items()}
    shown = {name: value for name, value in shown.items() if value is not None}
    return as_json(shown) if shown else None


def _plain(value: Any, depth: int = 0) -> Any:
    """Return numbers, short texts and short lists, or None if it is an object of the run."""
    kind = type(value)
    if kind is int:
        if -(2**63) <= value < 2**63:
            return value
        return str(value) if value.bit_length() < _MOST_TEXT else hex(value)[:_MOST_TEXT]
    if kind is bool or kind is float:
        return value
    if isinstance(value, str):
        short = value[:_MOST_TEXT]
        return short if short.isascii() else sendable(short)
    if depth < 3 and kind in (list, tuple):
        return [
            item if type(item) is int and -(2**63) <= item < 2**63 else _plain(item, depth + 1)
            for item in (value if len(value) <= _MOST_ITEMS else value[:_MOST_ITEMS])
        ]
    if depth < 3 and kind is dict:
        items = list(value.items())[:_MOST_ITEMS]
        return {sendable(str(name)): _plain(item, depth + 1) for name, item in items}
    return None
