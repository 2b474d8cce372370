"""Functions of users that raise what nobody expects, or that never return."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from millrace.environments import threads
from millrace.environments.threads import in_thread
from millrace.environments.tools import CallLimits, FunctionTool, run_calls
from millrace.errors import EpisodeError
from tests.waiting import HANG_S

SCHEMA = {"function": {"name": "f", "parameters": {"properties": {}}}}


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError


def calls_of(function: Any, times: int, deadline_s: float = HANG_S) -> list[str]:
    """Return the results of calls of one turn."""
    calls = [{"id": str(n), "function": {"name": "f", "arguments": {}}} for n in range(times)]
    made = {"f": FunctionTool(function, SCHEMA)}
    limits = CallLimits(deadline_s, max_parallel=times)

    async def main() -> list[str]:
        told = await run_calls(made, calls, limits, None, lambda name, value: None)
        return [str(message["content"]) for message in told]

    return asyncio.run(main())


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), Unreadable()], ids=repr
)
def test_whatever_a_tool_raises_is_text_for_the_policy(
    error: BaseException, times: int, plain: bool
) -> None:
    def fails() -> str:
        raise error

    async def fails_later() -> str:
        raise error

    found = calls_of(fails if plain else fails_later, times)
    assert len(found) == times and all(text.startswith("Error: ") for text in found)


@pytest.mark.parametrize("error", [StopIteration(1), GeneratorExit()], ids=repr)
def test_what_no_coroutine_may_raise_is_text_too(error: BaseException) -> None:
    def fails() -> str:
        raise error

    assert calls_of(fails, 1) == [f"Error: RuntimeError: {type(error).__name__}"]


def test_calls_that_never_return_keep_no_other_call_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool of asyncio.to_thread has fewer threads than these calls. Checkpoints need it too."""
    monkeypatch.setattr(threads, "MOST_LOST", 40)
    monkeypatch.setattr(threads, "_lost", set())  # without those of other tests
    go = threading.Event()
    late = calls_of(go.wait, 40, deadline_s=0.1)
    assert late == ["Error: the call took longer than 0.1 s"] * 40
    with pytest.raises(EpisodeError, match="40 calls are past their deadline") as caught:
        asyncio.run(in_thread(str))
    assert caught.value.reason == "tool_stuck"
    lost = set(threads._lost)
    go.set()
    for thread in lost:
        thread.join(HANG_S)
    assert asyncio.run(in_thread(str)) == "" and not threads._lost
    assert not any(thread.name.startswith("asyncio") for thread in threading.enumerate())
