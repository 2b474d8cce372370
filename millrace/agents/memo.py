"""Results of pure functions, kept for plain values that come again."""

from __future__ import annotations

import marshal
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

LONGEST = 64 * 1024
"""Bytes of the longest arguments whose result is kept."""


class Memo(Generic[_T]):
    """A pure function that remembers its last results. Nobody may change a result.

    Arguments are equal if they have the same types and values, and dicts the same order.
    """

    def __init__(self, function: Callable[..., _T], most_bytes: int = 4 << 20) -> None:
        self._function = function
        self._most = most_bytes
        self._held = 0
        self._known: OrderedDict[bytes, _T] = OrderedDict()

    def __call__(self, *values: Any) -> _T:
        try:
            key = marshal.dumps(values, 2)  # Version 2 has no references, so equals are equal.
        except ValueError:  # a type of its own
            return self._function(*values)
        if key in self._known:
            return self._known[key]
        result = self._function(*values)
        if len(key) <= LONGEST:
            self._known[key] = result
            self._held += len(key)
            while self._held > self._most:
                self._held -= len(self._known.popitem(last=False)[0])
        return result
