"""The ports, as spoken to workers: what the pipeline holds in its hands."""

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

_OBITUARY_S = 3.0
"""How long after a failed call a dead worker's process may still give back its memory. Until then it is not known to be dead."""
_LOOK_S = 0.01


_LOOKS = 8
"""How often within a request's deadline its replica is asked for its progress."""


class RemoteRolloutEngine:
    """A Replica in a worker.

    A request's deadline times its replica's lack of progress: it restarts while the replica draws or
    reads tokens of any request. So a long queue, such as a validation's, may take longer.
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
        """Restart the deadlines of requests while tokens are drawn or read. Runs while there are requests."""
        seen: tuple[int, int] | None = None
        with contextlib.suppress(MillraceError):  # a request says it, or waits for its deadline
            while True:
                await asyncio.sleep(self.peer.deadline_s / _LOOKS)
                stats = await self.stats()
                found = (stats.tokens, stats.prefill_tokens)
                if found != seen:
                    seen = found
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
    """A TrainEngine and a Sleeper on all ranks: the first rank's failure is the call's."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = peers

    async def step(self, batch: TrainBatch) -> StepReport:
        report: StepReport = (await self._all("step", (batch,), StepReport))[0]
        return report

    async def sft_step(self, examples: list[tuple[Tokens, Tokens]]) -> StepReport:
        report: StepReport = (await self._all("sft_step", (examples,), StepReport))[0]
        return report

    async def begin(self, phase: Phase, horizon: int) -> None:
        await self._all("begin", (phase, horizon))

    async def matmul_rates(self) -> list[float]:
        """Each rank's device: multiplications and additions a second of one large matmul."""
        return await all_of(self.peers, "matmul_rate", (), float)

    async def peak_memory(self) -> list[int]:
        """Each rank's: most bytes so far."""
        return await all_of(self.peers, "peak_memory", (), int)

    async def log_probs(self, samples: tuple[Sample, ...]) -> list[list[float]]:
        values: list[list[float]] = (await self._all("log_probs", (samples,), list[list[float]]))[0]
        return values

    async def save(self, folder: str, staged: bool = False) -> None:
        await self._all("save", (_absolute(folder), staged))

    async def saved(self) -> None:
        """The reply comes between two steps: a worker that computes serves nothing else."""
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
        """The trainer's ranks begin to send at once."""
        await all_of(self._trainers, "sender.keep", (version,))
        self._sending = version

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        begun, self._sending = self._sending, None
        if begun == version:
            return await self._arrival(version)
        sent, received = await asyncio.gather(
            all_of(self._trainers, "sender.transfer", (version,), TransferReport),
            all_of(self._replicas, "receiver.transfer", (version,), TransferReport),
        )
        return TransferReport(received[0].bytes, max(r.seconds for r in [*sent, *received]))

    async def _arrival(self, version: PolicyVersion) -> TransferReport:
        """Until all replicas have what is on its way to them: what has arrived, and is proven, was sent. The senders are busy with their
        next step, and answer after it; but if it is they who failed, or died, that is the error.
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
            if arrived.exception() and not any(p.lost for p in self._replicas):
                await sent
            received = arrived.result()
            return TransferReport(received[0].bytes, max(r.seconds for r in received))
        finally:
            arrived.cancel()
            sent.cancel()

    async def link(self) -> TransferReport:
        """The bytes of a transfer, and the seconds of sending them with nothing around it."""
        sent, received = await asyncio.gather(
            all_of(self._trainers, "sender.link", (), TransferReport),
            all_of(self._replicas, "receiver.link", (), TransferReport),
        )
        return TransferReport(received[0].bytes, max(r.seconds for r in sent))

    async def transport(self) -> str:
        """nccl or gloo."""
        (name, *_) = await all_of(self._trainers, "sender.transport", (), str)
        return str(name)

    async def activate(self, version: PolicyVersion) -> float:
        return max(await all_of(self._replicas, "receiver.activate", (version,), float))

    async def close(self) -> None:
        return None


def _absolute(folder: str) -> str:
    """A worker may live in another working directory."""
    return str(Path(folder).resolve())


async def all_of(
    peers: Sequence[Peer], method: str, args: tuple[object, ...] = (), result: object = None
) -> list[Any]:
    """The call on every peer at once; the first failure ends it."""
    return await first_error(peers, [p.call(method, args, result) for p in peers])


async def first_error(
    peers: Sequence[Peer], calls: Sequence[Coroutine[Any, Any, Any]]
) -> list[Any]:
    """Results of calls on `peers`; the first failure ends them.

    A lost worker is the error, not the peers whose collectives it broke: they fail within the same moment.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task.done() and task.exception()]
        if any(isinstance(task.exception(), (WorkerError, SyncError)) for task in failed):
            await _known_dead(peers)
        if lost := [p.lost for p in peers if failed and p.lost]:
            raise WorkerError(lost[0])
        return [task.result() for task in [*failed, *tasks]]
    finally:
        for task in tasks:
            task.cancel()


async def _known_dead(peers: Sequence[Peer]) -> None:
    """Until one of them is known to be dead, or all would have been."""
    clock = asyncio.get_running_loop().time
    end = clock() + _OBITUARY_S
    while not any(p.lost for p in peers) and clock() < end:  # noqa: ASYNC110 (a peer has no event to wait for)
        await asyncio.sleep(_LOOK_S)
