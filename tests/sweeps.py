"""Sweeps: `make test` runs a few cases of each, and `make test-all` the others too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], fast: Callable[[Any], object]) -> list[Any]:
    """Return the cases as parameters of a test. Those that are not `fast` are marked slow."""
    return [c if fast(c) else pytest.param(c, marks=pytest.mark.slow) for c in cases]
