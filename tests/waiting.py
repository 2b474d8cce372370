"""Waits of tests for states. Their guard ends a test that hangs, and is no part of what it tests."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

HANG_S = 600.0
"""No wait of a test takes as long, however busy the machine is. So a longer one is a hang.

A process that a test leaves behind on purpose lives for longer: its end must not pass for a kill.
"""
_POLL_S = 0.01
T = TypeVar("T")


def until(
    state: Callable[[], T], process: subprocess.Popen[Any] | None = None, output: Path | None = None
) -> T:
    """Wait until `state()` is true, and return it. `process` must live until then.

    A failure shows the file `output`.
    """
    end = time.monotonic() + HANG_S
    while not (found := state()):
        _check(end, process, output)
        time.sleep(_POLL_S)
    return found


async def until_async(state: Callable[[], T], shown: object = "") -> T:
    """Wait until `state()` is true while the event loop goes on, and return it."""
    end = time.monotonic() + HANG_S
    while not (found := state()):
        assert time.monotonic() < end, f"it did not come: {shown}"
        await asyncio.sleep(_POLL_S)
    return found


def _check(end: float, process: subprocess.Popen[Any] | None, output: Path | None) -> None:
    def shown() -> str:
        return output.read_text() if output is not None and output.exists() else ""

    ended = None if process is None else process.poll()
    assert ended is None, f"the process ended with {ended}:\n{shown()}"
    assert time.monotonic() < end, f"it did not come:\n{shown()}"


def at_some_pace(scenario: Callable[[float], None], first_s: float) -> None:
    """Run `scenario(seconds)`, with ever more seconds while it fails.

    For deadlines of other processes, whose clock no test can turn. What must come in time comes in
    time on a slow machine too, once the deadline is long enough. The scenario scales its own waits.
    """
    seconds = first_s
    while True:
        try:
            return scenario(seconds)
        except AssertionError:
            if seconds > HANG_S / 5:
                raise
        seconds *= 4
