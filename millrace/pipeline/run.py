"""Both loops together: leaving the block is the shutdown."""

from __future__ import annotations

import asyncio

from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.trainer import Trainer


async def run_pipeline(rollouter: Rollouter, trainer: Trainer) -> bool:
    """Run to the end, or to a stop; `trainer.begin()` has been awaited. Returns whether every sample of the run is trained and live.

    A failure in either loop, or in any task of theirs, ends both and is raised in an ExceptionGroup.
    """
    async with asyncio.TaskGroup() as tasks:
        producer = tasks.create_task(rollouter.run(), name="rollouter")
        await trainer.run()
        if not trainer.queue.ledger.done():
            await trainer.stop()
        producer.cancel()
    return trainer.queue.ledger.done()
