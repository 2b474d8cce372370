"""Sweeps: `make test` runs a few cases of each, and `make test-all` the others too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], fast: Callable[[Any], object]) -> list[Any]:
    """Return the cases as parameters of a test. Those that are not `fast` are marked slow."""

    def slow(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)

    return [case if fast(case) else slow(case) for case in cases]


def thorough(config: pytest.Config) -> bool:
    """Return whether the slow tests run too, for fixtures that do the work of many tests."""
    return "not slow" not in config.option.markexpr
