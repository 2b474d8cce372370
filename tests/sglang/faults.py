"""Faults inside SGLang's schedulers, and slow outputs, on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from millrace.extras.sglang import scheduler
from millrace.serving.live_weights import LiveWeights
from tests.serving.faults import Faults


class FaultyExtension(Faults, scheduler.SchedulerExtension):
    """millrace's extension of the schedulers, with faults for tests."""

    @property
    def weights(self) -> LiveWeights:
        return self


def run(*args: Any, **kwargs: Any) -> None:
    scheduler.SchedulerExtension = FaultyExtension  # type: ignore[misc]
    scheduler.run(*args, **kwargs)


def plant(patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Let engines have the faults. Return the function that builds one."""
    from millrace.extras.sglang import engine

    patch.setattr(engine._Engine, "run_scheduler_process_func", staticmethod(run))
    return engine.build


def delay_outputs(engine: Any, seconds: float) -> Callable[[], None]:
    """Let outputs arrive late. Return a function that ends this."""
    manager = engine._manager
    honest = manager._handle_batch_output

    async def late(output: Any) -> None:
        await asyncio.sleep(seconds)
        await honest(output)

    def end() -> None:
        manager._handle_batch_output = honest

    manager._handle_batch_output = late
    return end


def cores() -> list[psutil.Process]:
    """Return SGLang's schedulers under this process."""
    children = psutil.Process().children(recursive=True)
    return [p for p in children if p.name().startswith("sglang::sch")]
