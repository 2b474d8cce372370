"""Both loops together: leaving the block is the shutdown."""

from __future__ import annotations

import asyncio

from millrace.pipeline.record import RunRecord
from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.stop import StopRequest
from millrace.pipeline.trainer import Trainer


async def run_pipeline(rollouter: Rollouter, trainer: Trainer) -> bool:
    """Run to the end, or to a stop; `trainer.begin()` has been awaited.

    Returns whether every sample of the run is trained and live. A failure in either loop, or in any
    of their tasks, ends both and is raised in an ExceptionGroup.
    """
    async with asyncio.TaskGroup() as tasks:
        producer = tasks.create_task(rollouter.run(), name="rollouter")
        await trainer.run()
        if not trainer.queue.ledger.done():
            await trainer.stop()
        producer.cancel()
    return trainer.queue.ledger.done()


async def settle(
    trained: bool, trainer: Trainer, record: RunRecord, stop: StopRequest, *, save_last: bool
) -> bool:
    """Wait for the last validation and checkpoint of a run, `trained` or stopped.

    Returns whether the run is complete: a run that trained all its samples may be told to stop
    here, and then saves.
    """
    if trained:
        await record.validated()
        await record.checkpointed()
        if save_last or stop.requested:
            await trainer.stop()
        stop.detach()
    complete = trained and not stop.requested
    if not complete:
        record.abandon_validation()
    return complete
