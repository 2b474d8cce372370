"""Waits of tests, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
