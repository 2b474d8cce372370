"""The two loops of the pipeline, run together."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.trainer import Trainer


async def run_pipeline(rollouter: Rollouter, trainer: Trainer) -> bool:
    """Run both loops to the end or to a stop. The caller has awaited `trainer.begin()`.

    Return whether every sample of the run is trained and live. A failure in either loop, or in any
    of their tasks, ends both and is raised in an ExceptionGroup.
    """
    with _rare_collections():
        async with asyncio.TaskGroup() as tasks:
            producer = tasks.create_task(rollouter.run(), name="rollouter")
            await trainer.run()
            if not trainer.queue.ledger.done():
                await trainer.stop()
            producer.cancel()
    return trainer.queue.ledger.done()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage cycles more rarely than Python does by default.

    A collection looks at every live object. With 65,536 samples under way, the default thresholds
    double the cost of a sample (docs/benchmarks.md). Reference counts free almost everything here.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
