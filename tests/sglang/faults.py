"""Faults inside SGLang's schedulers, and slow outputs, on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from sglang.srt.managers.io_struct import PauseGenerationReqInput

from millrace.extras.sglang import scheduler
from millrace.serving.live_weights import LiveWeights
from tests.serving.faults import Faults


class FaultyExtension(Faults, scheduler.SchedulerExtension):
    """millrace's extension of the schedulers, with faults for tests."""

    log: dict[str, list[int]]
    """The version of each drawn token by request: the live one when its step was launched."""

    @property
    def weights(self) -> LiveWeights:
        return self

    def start_log(self) -> None:
        """Write `log` from now on, beside millrace's own counts."""
        scheduler, self.log = self.scheduler, {}
        run, process = type(scheduler).run_batch, type(scheduler).process_batch_result
        launched: dict[int, int] = {}

        def run_batch(batch: Any, *args: Any) -> Any:
            result = run(scheduler, batch, *args)
            launched[id(result)] = self._live
            return result

        def process_batch_result(batch: Any, result: Any) -> None:
            version = launched.pop(id(result))
            before = [len(request.output_ids) for request in batch.reqs]
            process(scheduler, batch, result)
            for request, count in zip(batch.reqs, before, strict=True):
                new = len(request.output_ids) - count
                self.log.setdefault(request.rid, []).extend([version] * new)

        scheduler.run_batch, scheduler.process_batch_result = run_batch, process_batch_result

    def retract(self) -> None:
        """Pause, and put all requests back into the queue, as a full KV cache does with some."""
        self.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))

    def pause_at_a_part(self) -> None:
        """Go on until a part of a retracted request is read, and pause then."""
        scheduler = self.scheduler
        run = scheduler.run_batch

        def run_batch(batch: Any, *args: Any) -> Any:
            if self.is_at_a_part():
                scheduler._engine_paused = True
                scheduler.run_batch = run
            return run(batch, *args)

        scheduler.run_batch = run_batch
        self.resume()

    def is_at_a_part(self) -> bool:
        request = self.scheduler.chunked_req
        return request is not None and bool(request.output_ids)

    def take_log(self) -> dict[str, list[int]]:
        """Return the log and end it."""
        del self.scheduler.run_batch, self.scheduler.process_batch_result
        return self.log


def _nothing() -> None:
    """Do nothing."""


def run(*args: Any, **kwargs: Any) -> None:
    scheduler.SchedulerExtension = FaultyExtension  # type: ignore[misc]
    if not torch.cuda.is_available():
        # SGLang's checker of weights waits for a GPU.
        torch.cuda.synchronize = _nothing  # type: ignore[assignment]
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
