"""The warm-up leaves nothing behind when it is stopped."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.run.sft import warm_up


class Train:
    """A train engine whose step never ends."""

    def __init__(self) -> None:
        self.step: asyncio.Task[Any] | None = None

    async def begin(self, phase: str, horizon: int) -> None: ...

    async def sft_step(self, examples: object) -> None:
        self.step = asyncio.current_task()
        await asyncio.sleep(1e6)


def test_a_stop_ends_the_step_that_is_under_way() -> None:
    """A step that nobody awaits would fail with its worker.

    Its traceback would be the last lines of the output.
    """

    async def stopped() -> bool:
        train = Train()
        sft = SimpleNamespace(steps=9, batch_size=4)
        session: Any = SimpleNamespace(
            config=SimpleNamespace(sft=sft),
            problems=SimpleNamespace(examples=lambda start, count: waits.wait(0.3) or []),
            engines=SimpleNamespace(train=train),
        )
        task = asyncio.create_task(warm_up(session))
        while train.step is None:  # noqa: ASYNC110 (the engine has no event)
            await asyncio.sleep(0.01)
        task.cancel()  # while the next examples are made
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        return train.step.cancelled()

    waits = threading.Event()
    assert asyncio.run(stopped())
