"""The ports on the driver's side: each call goes to the workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from millrace.errors import MillraceError, SyncError, WorkerError
from millrace.ports import Phase, RolloutStats, StepReport, TrainBatch, TransferReport
from millrace.runtime.rpc import Peer
from millrace.types import PolicyVersion, Sample, SamplingParams, Segment, Tokens
from millrace.waits.registry import current, within

_DEATH_REPORT_S = 3.0
"""How long to wait, after a failed call, for a worker to be reported dead.

A killed process first frees its memory, and only then is its death reported.
"""
_POLL_S = 0.01
_POLLS_PER_DEADLINE = 8
"""How often the driver asks a replica for its progress within a request's deadline."""


class RemoteRolloutEngine:
    """A Replica in a worker.

    A request's deadline limits its replica's time without progress. It restarts while the replica
    draws or reads tokens of any request. A long queue, as in a validation, may take longer.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._requests = 0
        self._follower: asyncio.Task[None] | None = None

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        self._requests += 1
        if self._follower is None:
            self._follower = asyncio.create_task(self._follow(), name="progress")
        try:
            return await self.peer.call(
                "engine.generate", (tokens, params, session), tuple[Segment, ...]
            )
        finally:
            self._requests -= 1
            if not self._requests and self._follower is not None:
                self._follower.cancel()
                self._follower = None

    async def _follow(self) -> None:
        """Restart the deadlines of requests while the replica draws or reads tokens.

        The task runs while there are requests.
        """
        last: tuple[int, int] | None = None
        own = within(current().registry.root)  # The request that began it may end before.
        with own, contextlib.suppress(MillraceError):  # the requests themselves raise the error
            while True:
                await asyncio.sleep(self.peer.deadline_s / _POLLS_PER_DEADLINE)
                stats = await self.stats()
                progress = (stats.tokens, stats.prefill_tokens)
                if progress != last:
                    last = progress
                    self.peer.progressed("engine.generate")

    async def interrupt(self) -> None:
        await self.peer.call("engine.interrupt")

    async def stats(self) -> RolloutStats:
        return await self.peer.call("engine.stats", (), RolloutStats)

    async def sleep(self, keep_weights: bool = True) -> None:
        await self.peer.call("engine.sleep", (keep_weights,))

    async def wake_weights(self) -> None:
        await self.peer.call("engine.wake_weights")

    async def wake(self) -> None:
        await self.peer.call("engine.wake")

    async def close(self) -> None:
        await self.peer.call("engine.close")


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


class RemoteWeightSync:
    """A WeightSync between workers."""

    def __init__(self, trainers: Sequence[Peer], replicas: Sequence[Peer]) -> None:
        self._trainers = trainers
        self._replicas = replicas
        self._sending: PolicyVersion | None = None

    async def keep(self, version: PolicyVersion) -> None:
        """Keep a version. The trainer's ranks begin to send it at once."""
        await all_of(self._trainers, "sender.keep", (version,))
        self._sending = version

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        sending, self._sending = self._sending, None
        if sending == version:
            return await self._arrival(version)
        sent, received = await asyncio.gather(
            all_of(self._trainers, "sender.transfer", (version,), TransferReport),
            all_of(self._replicas, "receiver.transfer", (version,), TransferReport),
        )
        return TransferReport(received[0].bytes, max(r.seconds for r in [*sent, *received]))

    async def _arrival(self, version: PolicyVersion) -> TransferReport:
        """Wait until all replicas have the version that is on its way, and return the report.

        A version that arrived and was proven needs no answer from the senders. They answer only
        after their next step. If a sender failed or died, its error is the one raised.
        """
        arrived = asyncio.ensure_future(
            all_of(self._replicas, "receiver.transfer", (version,), TransferReport)
        )
        sent = asyncio.ensure_future(all_of(self._trainers, "sender.sent"))
        try:
            await asyncio.wait([arrived, sent], return_when=asyncio.FIRST_COMPLETED)
            if sent.done():
                sent.result()
            await asyncio.wait([arrived])
            if arrived.exception() and not any(p.death for p in self._replicas):
                await sent
            received = arrived.result()
            return TransferReport(received[0].bytes, max(r.seconds for r in received))
        finally:
            arrived.cancel()
            sent.cancel()

    async def link(self) -> TransferReport:
        """Return the bytes of a transfer, and the seconds that the link alone needs for them."""
        sent, received = await asyncio.gather(
            all_of(self._trainers, "sender.link", (), TransferReport),
            all_of(self._replicas, "receiver.link", (), TransferReport),
        )
        return TransferReport(received[0].bytes, max(r.seconds for r in sent))

    async def transport(self) -> str:
        """Return the name of the transport, such as nccl or gloo."""
        (name, *_) = await all_of(self._trainers, "sender.transport", (), str)
        return str(name)

    async def activate(self, version: PolicyVersion) -> float:
        return max(await all_of(self._replicas, "receiver.activate", (version,), float))


def _absolute(folder: str) -> str:
    """Return the absolute path. A worker may have another working directory."""
    return str(Path(folder).resolve())


async def all_of(
    peers: Sequence[Peer], method: str, args: tuple[object, ...] = (), result: object = None
) -> list[Any]:
    """Call a method on all peers at once. The first failure ends the call."""
    return await first_error(peers, [p.call(method, args, result) for p in peers])


async def first_error(
    peers: Sequence[Peer], calls: Sequence[Coroutine[Any, Any, Any]]
) -> list[Any]:
    """Return the results of calls on `peers`. The first failure ends all calls.

    A dead worker breaks the collectives of other workers, which then fail too. In that case the
    dead worker is the error shown.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task.done() and task.exception()]
        if any(isinstance(task.exception(), (WorkerError, SyncError)) for task in failed):
            await _wait_for_death(peers)
        if deaths := [p.death for p in peers if failed and p.death]:
            raise WorkerError(deaths[0])
        return [task.result() for task in [*failed, *tasks]]
    finally:
        for task in tasks:
            task.cancel()


async def _wait_for_death(peers: Sequence[Peer]) -> None:
    """Wait until one of the peers is reported dead, at most _DEATH_REPORT_S seconds."""
    clock = asyncio.get_running_loop().time
    end = clock() + _DEATH_REPORT_S
    while not any(p.death for p in peers) and clock() < end:  # noqa: ASYNC110 - a peer has no event
        await asyncio.sleep(_POLL_S)
