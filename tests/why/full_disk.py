"""A driver whose metrics.jsonl is a pipe that nobody reads, so its write blocks the event loop.

`python -m tests.why.full_disk RUN`
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, cast

from millrace.extras.faults.attempt import NoView
from millrace.observe.metrics import RunCounts
from millrace.observe.progress import Progress
from millrace.observe.sinks import JsonLines
from millrace.persist.history import History
from millrace.pipeline.record import RunRecord
from millrace.schedule.ledger import Ledger
from millrace.schedule.schedule import Schedule
from millrace.waits.registry import as_actor, waiting
from millrace.waits.wait_server import FOLDER, WaitServer


async def main(run: Path) -> None:
    os.mkfifo(run / "metrics.jsonl")
    reader = os.open(run / "metrics.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    side = WaitServer("driver")
    side.loop = asyncio.get_running_loop()
    side.start(run / FOLDER)
    totals = Ledger(Schedule(ppo_mini_batch_size=1)).totals()
    sink = JsonLines(run / "metrics.jsonl", None)
    nothing = cast("Any", None)
    async with asyncio.TaskGroup() as tasks:
        record = RunRecord(
            history=History(run, totals), checkpoints=nothing, engine=nothing, validator=None,
            sinks=[sink], progress=Progress(NoView(), "r", "m"), save_freq=0, async_save=False,
            test_freq=0, guard=None, counts=RunCounts({}), deadline_s=1.0, tasks=tasks,
        )  # fmt: skip

        async def rollouts() -> None:
            with waiting("trainer", "a free slot"):
                await asyncio.sleep(1e6)

        tasks.create_task(as_actor("rollouter", rollouts()))
        await asyncio.sleep(0.1)

        async def trains() -> None:
            for version in range(10_000):
                record.row(version, {"reward/mean": 0.0, "staleness/mean": 0.0})

        await as_actor("trainer", trains())
    os.close(reader)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
