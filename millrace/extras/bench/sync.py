"""`millrace bench sync`: the cost of a weight sync, with idle and with busy rollout engines.

The benchmark also measures the bandwidth of the bare link, for comparison.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from millrace.errors import DeadlineError
from millrace.run.session import Session
from millrace.types import SamplingParams


@dataclass(frozen=True, slots=True)
class SyncFigures:
    """The figures of one sync."""

    load: str
    """The load of the engines: idle, or busy (every decode slot has a request)."""
    bytes: int
    transfer_s: float
    pause_s: float

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.transfer_s / 1e9


async def bench_sync(s: Session, repeats: int) -> dict[str, Any]:
    """Time `repeats` syncs of idle engines, `repeats` syncs of busy engines, and the bare link."""
    await s.engines.train.begin("rl", 1)
    await s.engines.publish(0)
    link = [await s.engines.sync.link() for _ in range(3)]
    ceiling = max(report.bytes / report.seconds for report in link)
    transport = await s.engines.sync.transport()
    s.progress.phase("syncing an idle engine")
    idle = [await _sync(s, 1 + k, "idle") for k in range(repeats)]
    s.progress.phase("syncing a busy engine")
    # Colocated replicas draw no tokens during a sync.
    busy = [] if s.config.schedule.colocated else await _under_load(s, 1 + repeats, repeats)
    figures: dict[str, Any] = {
        "transport": transport,
        "bytes": idle[0].bytes,
        "link_gb_per_s": ceiling / 1e9,
        "syncs": [asdict(f) for f in (*idle, *busy)],
    }
    for load, syncs in (("idle", idle), ("busy", busy)):
        if not syncs:
            continue
        figures[load] = {
            "transfer_s": statistics.median(f.transfer_s for f in syncs),
            "pause_s": statistics.median(f.pause_s for f in syncs),
            "gb_per_s": statistics.median(f.gb_per_s for f in syncs),
            "share_of_link": statistics.median(f.gb_per_s for f in syncs) * 1e9 / ceiling,
        }
    return figures | {"complete": True}


async def _sync(s: Session, version: int, load: str) -> SyncFigures:
    report, pause_s = await s.engines.publish(version)
    return SyncFigures(load, report.bytes, report.seconds, pause_s)


async def _under_load(s: Session, first: int, repeats: int) -> list[SyncFigures]:
    """Time syncs while every slot of every replica decodes responses of full length."""
    rollout = s.config.rollout
    syncs: list[SyncFigures] = []
    params = SamplingParams(rollout.max_response_length, rollout.temperature, ignore_eos=True)

    async def draw_for_ever(slot: int) -> None:
        prompt = s.problems.train[slot % len(s.problems.train)]
        while True:
            await s.engines.pool.generate(prompt.tokens, params, f"bench-{slot}")

    tasks = [
        asyncio.create_task(draw_for_ever(k)) for k in range((await s.engines.pool.stats()).slots)
    ]
    try:
        for k in range(repeats):
            await _one_more_each(s, tasks)
            syncs.append(await _sync(s, first + k, "busy"))
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
    return syncs


async def _one_more_each(s: Session, drawers: Sequence[asyncio.Task[None]]) -> None:
    """Wait until the engines have drawn one more token for each of `drawers`, on average.

    Raises the error of a failed drawer, and DeadlineError after trainer.wait_deadline_s.
    """
    goal = (await s.engines.pool.stats()).tokens + len(drawers)
    clock, limit_s = asyncio.get_running_loop().time, s.config.trainer.wait_deadline_s
    end = clock() + limit_s
    while (await s.engines.pool.stats()).tokens < goal:
        for task in drawers:
            if task.done():
                task.result()
        if clock() > end:
            raise DeadlineError(
                f"the rollout engines drew fewer than {len(drawers)} tokens in "
                f"trainer.wait_deadline_s = {limit_s:g} s"
            )
        await asyncio.sleep(0.01)
