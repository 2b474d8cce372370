"""The definitions in the files of a folder: losses, estimators."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import TypeVar

T = TypeVar("T")


def found_in(package: str, kind: type[T]) -> Iterator[T]:
    """Yield the objects of a kind at the top of each module of a package, in order of the files."""
    for info in pkgutil.iter_modules(import_module(package).__path__):
        for value in vars(import_module(f"{package}.{info.name}")).values():
            if isinstance(value, kind):
                yield value
