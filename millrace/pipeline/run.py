"""The two loops of the pipeline, run together."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

from millrace.pipeline.rollouter import Rollouter
from millrace.pipeline.trainer import Trainer
from millrace.waits.registry import as_actor

_OBJECTS = 80
"""Objects with references that a running trajectory keeps alive, about."""


async def run_pipeline(rollouter: Rollouter, trainer: Trainer) -> bool:
    """Run both loops to the end or to a stop. The caller has awaited `trainer.begin()`.

    Return whether every sample of the run is trained and live. A failure in either loop, or in any
    of their tasks, ends both and is raised in an ExceptionGroup.
    """
    capacity, roster = trainer.queue.ledger.schedule.capacity, rollouter.pool.roster
    with (
        _rare_collections(capacity * rollouter.roller.num_responses),
        roster.subscribe(lambda change: trainer.queue.wake_all()),
    ):
        async with asyncio.TaskGroup() as tasks:
            producer = tasks.create_task(_roll(rollouter), name="rollouter")
            await as_actor("trainer", trainer.run())
            if not trainer.queue.ledger.done():
                await as_actor("trainer", trainer.stop())
            producer.cancel()
    return trainer.queue.ledger.done()


async def _roll(rollouter: Rollouter) -> None:
    """Run the rollout loop. A task that is cancelled before it begins has made no coroutine."""
    await as_actor("rollouter", rollouter.run())


@contextmanager
def _rare_collections(trajectories: int) -> Iterator[None]:
    """Collect garbage cycles more rarely than Python does by default.

    A collection looks at every live object. So it waits for as many new objects as `trajectories`,
    all that can be in flight, keep alive. Its cost for each sample then does not grow with their
    number (docs/benchmarks.md). Reference counts free almost everything here.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(100_000, _OBJECTS * trajectories), 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
