"""Replaces a function by another one while a block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute of `owner` by what `make` returns for it."""
    before = owner.__dict__[name]
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)
