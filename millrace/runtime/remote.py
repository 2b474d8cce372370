"""The ports on the driver's side: each call goes to the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from millrace.errors import SyncError, WorkerError
from millrace.ports import Phase, StepReport, TrainBatch
from millrace.runtime.rpc import Peer
from millrace.types import Sample, Tokens

_DEATH_REPORT_S = 10.0
"""How long to wait, after a failed call, for a worker to be reported dead.

A killed process first frees its memory, and only then is its death reported.
"""
_SHARE = 1 / 20
"""The largest share of a call's deadline that this wait may take.

A sync that breaks off waits twice. It may break off three times in a third of the deadline.
"""
_POLL_S = 0.01


class RemoteTrainEngine:
    """A TrainEngine and a Sleeper on all ranks. The first failure of a rank fails the call."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = peers

    async def step(self, batch: TrainBatch) -> StepReport:
        report: StepReport = (await self._all("step", (batch,), StepReport))[0]
        return report

    async def sft_step(self, examples: list[tuple[Tokens, ...]]) -> StepReport:
        report: StepReport = (await self._all("sft_step", (examples,), StepReport))[0]
        return report

    async def begin(self, phase: Phase, horizon: int) -> None:
        await self._all("begin", (phase, horizon))

    async def matmul_rates(self) -> list[float]:
        """Return each rank's multiplications and additions per second, in a large matmul."""
        return await all_of(self.peers, "matmul_rate", (), float)

    async def peak_memory(self) -> list[int]:
        """Return each rank's peak memory so far, in bytes."""
        return await all_of(self.peers, "peak_memory", (), int)

    async def log_probs(self, samples: tuple[Sample, ...]) -> list[list[float]]:
        values: list[list[float]] = (await self._all("log_probs", (samples,), list[list[float]]))[0]
        return values

    async def reference_log_probs(
        self, samples: tuple[Sample, ...], seconds: float
    ) -> list[list[list[float]]]:
        result = list[list[list[float]]]
        values: list[list[list[float]]] = (
            await self._all("reference_log_probs", (samples, seconds), result)
        )[0]
        return values

    async def displace(self, away: bool) -> None:
        await self._all("displace", (away,))

    async def save(self, folder: str, staged: bool = False) -> None:
        await self._all("save", (_absolute(folder), staged))

    async def saved(self) -> None:
        """Wait for the writers. A rank replies between two steps, because a step blocks it."""
        await self._all("saved")

    async def load(self, folder: str) -> None:
        await self._all("load", (_absolute(folder),))

    async def export(self, folder: str) -> None:
        await self._all("export", (_absolute(folder),))

    async def sleep(self) -> None:
        await self._all("sleep")

    async def wake(self) -> None:
        await self._all("wake")

    async def close(self) -> None:
        await self._all("close")

    async def _all(
        self, method: str, args: tuple[object, ...] = (), result: object = None
    ) -> list[Any]:
        return await all_of(self.peers, f"engine.{method}", args, result)


def _absolute(folder: str) -> str:
    """Return the absolute path. A worker may have another working directory."""
    return str(Path(folder).resolve())


async def all_of(
    peers: Sequence[Peer], method: str, args: tuple[object, ...] = (), result: object = None
) -> list[Any]:
    """Call a method on all peers at once. The first failure ends the call."""
    peers = [*peers]  # the caller's list may get others meanwhile
    return await first_error(peers, [p.call(method, args, result) for p in peers])


async def first_error(
    peers: Sequence[Peer], calls: Sequence[Coroutine[Any, Any, Any]]
) -> list[Any]:
    """Return the results of calls on `peers`. The first failure ends all calls.

    A dead worker breaks the collectives of other workers, which then fail too. In that case the
    dead worker is the error shown.
    """
    if len(calls) == 1:  # Without a task of its own, the call is sent a turn of the loop earlier.
        return [await _first_error_of(peers, calls[0])]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task.done() and task.exception()]
        if any(isinstance(task.exception(), (WorkerError, SyncError)) for task in failed):
            await wait_for_death(peers)
        if deaths := [p.death for p in peers if failed and p.death]:
            raise WorkerError(deaths[0])
        return [task.result() for task in [*failed, *tasks]]
    finally:
        for task in tasks:
            task.cancel()


async def _first_error_of(peers: Sequence[Peer], call: Coroutine[Any, Any, Any]) -> Any:
    """Do what `first_error` does, for one call."""
    try:
        return await call
    except Exception as error:
        if isinstance(error, WorkerError | SyncError):
            await wait_for_death(peers)
        if deaths := [p.death for p in peers if p.death]:
            raise WorkerError(deaths[0]) from None
        raise


async def wait_for_death(peers: Sequence[Peer]) -> None:
    """Wait until one of the peers is reported dead, at most _DEATH_REPORT_S seconds."""
    clock = asyncio.get_running_loop().time
    end = clock() + min([_DEATH_REPORT_S, *(_SHARE * p.deadline_s for p in peers)])
    while not any(p.death for p in peers) and clock() < end:  # noqa: ASYNC110 - a peer has no event
        await asyncio.sleep(_POLL_S)
