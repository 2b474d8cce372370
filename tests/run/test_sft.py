"""The warm-up leaves nothing behind when it is stopped."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.rollout.episode import SingleTurn
from millrace.run.start import warm_up


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
        sft = SimpleNamespace(steps=9, batch_size=4, demonstrations=0)
        session: Any = SimpleNamespace(
            config=SimpleNamespace(sft=sft),
            agent=SingleTurn(),
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


@pytest.mark.parametrize("demonstrations", [0, 4, 6, 100])
def test_demonstrations_come_again_after_their_number(demonstrations: int) -> None:
    made: list[int] = []
    steps: list[list[int]] = []

    class Learner:
        async def begin(self, phase: str, horizon: int) -> None: ...

        async def sft_step(self, examples: list[int]) -> Any:
            steps.append(examples)
            return SimpleNamespace(metrics={"sft/loss": 1.0})

    def examples(start: int, count: int) -> list[int]:
        made.extend(range(start, start + count))
        return list(range(start, start + count))

    session: Any = SimpleNamespace(
        config=SimpleNamespace(
            sft=SimpleNamespace(steps=5, batch_size=4, demonstrations=demonstrations)
        ),
        agent=SingleTurn(),
        problems=SimpleNamespace(examples=examples),
        engines=SimpleNamespace(train=Learner()),
        progress=SimpleNamespace(phase=lambda *a: None),
    )
    assert asyncio.run(warm_up(session)) == 1.0
    most = demonstrations or 100
    assert steps == [[(4 * k + i) % most for i in range(4)] for k in range(5)]
    assert made == list(range(min(20, most)))
