"""The root objects of simulated workers: engines, and both ends of a weight sync.

The weights of a version are the list of the samples that trained it. A checksum of this list stands
for the tensors. It travels with a sync, is proven, and is saved in checkpoints.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from millrace.errors import SyncError
from millrace.ports import Phase, StepReport, TrainBatch, TransferReport
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimRolloutEngine, SimTrainEngine
from millrace.simulate.faults.disk import SimPath, View
from millrace.types import PolicyVersion, SamplingParams, Segment, Tokens
from millrace.waits.registry import count, doing, gauge, waiting

Lineage = list[int]
"""The ids of the samples that trained the weights, in order."""


def checksum(lineage: Sequence[int]) -> int:
    return zlib.crc32(msgspec.msgpack.encode(lineage))


@dataclass(slots=True)
class Parcel:
    """The rows of one rank on their way to one replica."""

    weights: int
    sent: int
    """The sender's checksum. Damage on the way changes `weights` alone."""


class Wire:
    """The process groups of a weight sync, from every rank to every replica."""

    def __init__(self, ranks: int, replicas: int, cost: CostModel, timeout_s: float) -> None:
        self.ranks, self.replicas = ranks, replicas
        self.damage = False
        """Whether the next parcel loses a bit."""
        self._cost, self._timeout_s = cost, timeout_s
        self._broken = asyncio.Event()
        self._boxes = {
            (r, k): asyncio.Queue[Parcel]() for r in range(ranks) for k in range(replicas)
        }

    def break_off(self) -> None:
        """Close the groups, because one of their processes is dead."""
        self._broken.set()

    async def send(self, rank: int, weights: int) -> TransferReport:
        await asyncio.sleep(self._cost.transfer_s)
        if self._broken.is_set():
            raise SyncError("a weight transfer broke off: connection closed by peer")
        for replica in range(self.replicas):
            wrong, self.damage = self.damage, False
            self._boxes[rank, replica].put_nowait(Parcel(weights ^ wrong, weights))
        return TransferReport(8, self._cost.transfer_s)

    async def receive(self, replica: int, version: PolicyVersion) -> int:
        """Return the weights that arrive. Raises SyncError if they break off or are damaged."""
        boxes = [self._boxes[rank, replica] for rank in range(self.ranks)]
        arrive = [asyncio.ensure_future(box.get()) for box in boxes]
        broken = asyncio.ensure_future(self._broken.wait())
        try:
            async with asyncio.timeout(self._timeout_s):
                for rank, box in enumerate(arrive):
                    whom, sync = f"trainer-{rank}", f"the weight sync of trainer rank {rank}"
                    with waiting(whom, f"bucket 1 of version {version}", sync, version):
                        await asyncio.wait([box, broken], return_when=asyncio.FIRST_COMPLETED)
                    if not box.done():
                        raise SyncError("a weight transfer broke off: connection closed by peer")
        except TimeoutError:
            raise SyncError("a weight transfer broke off: timed out (sync.timeout_s)") from None
        finally:
            for task in (*arrive, broken):
                task.cancel()
        parcels = [box.result() for box in arrive]
        if any(p.weights != p.sent for p in parcels):
            raise SyncError(
                f"replica {replica}: received weights of version {version} are not the trainer's"
            )
        return parcels[0].weights


class FaultyRollouts(SimRolloutEngine):
    """A rollout engine with the checksum of its weights, which can stand still."""

    def __init__(
        self, cost: CostModel, slots: int, serves: Callable[[PolicyVersion, int], None]
    ) -> None:
        """`serves` sees the version and the weights that begin and end each request."""
        super().__init__(cost, slots=slots)
        self.weights = 0
        self._serves = serves
        self._moves = asyncio.Event()
        self._moves.set()

    def end(self) -> None:
        """End with the process."""

    def stand_still(self, seconds: float) -> None:
        """Return nothing from `generate` for `seconds`. Other calls are answered."""
        self._moves.clear()
        asyncio.get_running_loop().call_later(seconds, self._moves.set)

    async def generate(
        self, tokens: Tokens, params: SamplingParams, session: str
    ) -> tuple[Segment, ...]:
        self._serves(self.version, self.weights)
        gauge("tokens", self.drawn)
        segments = await super().generate(tokens, params, session)
        self._serves(self.version, self.weights)
        await self._moves.wait()
        return segments


class Receiver:
    """The receiving end of a replica: stage, prove, make live."""

    def __init__(self, engine: FaultyRollouts, wire: Wire, replica: int) -> None:
        self.skips = False
        """Whether the next swap leaves the live weights as they are."""
        self._engine, self._wire, self._replica = engine, wire, replica
        self._staged: tuple[PolicyVersion, int] | None = None

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        self._staged = None
        self._staged = version, await self._wire.receive(self._replica, version)
        return TransferReport(8, 0.0)

    async def activate(self, version: PolicyVersion) -> float:
        if self._staged is None or self._staged[0] != version:
            raise SyncError(f"replica {self._replica} cannot serve version {version}")
        weights, skips, self.skips = self._staged[1], self.skips, False
        if skips:
            raise SyncError(
                f"replica {self._replica}: live weights of version {version} are not the trainer's"
            )
        paused = await self._engine.swap(version)
        self._engine.weights = weights
        return paused


class RolloutRoot:
    """The root of a simulated replica's worker."""

    def __init__(self, engine: FaultyRollouts, wire: Wire, replica: int) -> None:
        self.engine = engine
        self.receiver = Receiver(engine, wire, replica)


class Ranks:
    """The ranks of one trainer. A step and a save need all of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._arrived = self._meetings = 0
        self._turn = asyncio.Event()
        self._lost = False

    def lose(self) -> None:
        """Break the collectives, because a rank is dead."""
        self._lost = True
        self._turn.set()

    async def meet(self) -> None:
        """Wait until every rank is here."""
        self._arrived += 1
        self._meetings += self._arrived == 1
        turn = self._turn
        if self._arrived == self.count:
            self._arrived, self._turn = 0, asyncio.Event()
            turn.set()
        with waiting("trainer-*", "all-reduce", "a step", self._meetings):
            await turn.wait()
        if self._lost:
            self._turn.set()
            raise RuntimeError("Connection closed by peer")


class FaultyTrainer(SimTrainEngine):
    """One rank of a trainer, whose weights are a Lineage and whose saves take time."""

    def __init__(
        self, cost: CostModel, rank: int, ranks: Ranks, view: View, write_s: float
    ) -> None:
        super().__init__(cost)
        self.lineage: Lineage = []
        self._rank, self._ranks, self._view, self._write_s = rank, ranks, view, write_s
        self._writing: asyncio.Future[None] | None = None

    def end(self) -> None:
        """End with the process: the collectives break, and what is not written stays unwritten."""
        self._ranks.lose()
        if self._writing is not None:
            self._writing.cancel()

    async def begin(self, phase: Phase, horizon: int) -> None:
        await self._ranks.meet()

    async def step(self, batch: TrainBatch) -> StepReport:
        await self._ranks.meet()
        with doing("backward of micro-batch 1"):
            report = await super().step(batch)
        count("passes")
        self.trained.clear()
        self.lineage += [sample.prompt.index for sample in batch.samples]
        return report

    async def save(self, folder: str, staged: bool = False) -> None:
        await self.saved()
        await self._ranks.meet()
        state = msgspec.json.encode(self.lineage)
        self._writing = asyncio.ensure_future(self._write(folder, state))
        if not staged:
            await self.saved()

    async def _write(self, folder: str, state: bytes) -> None:
        await asyncio.sleep(self._write_s)
        SimPath(self._view, f"{folder}/rank-{self._rank}").write_bytes(state)

    async def saved(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def load(self, folder: str) -> None:
        await self._ranks.meet()
        self.lineage = msgspec.json.decode(
            SimPath(self._view, f"{folder}/rank-0").read_bytes(), type=Lineage
        )


class Sender:
    """The sending end of one rank."""

    def __init__(
        self,
        engine: FaultyTrainer,
        wire: Wire,
        rank: int,
        seals: Callable[[PolicyVersion, Lineage], None],
    ) -> None:
        """`seals` sees each version and the samples that trained its weights."""
        self._engine, self._wire, self._rank, self._seals = engine, wire, rank, seals
        self._sending: asyncio.Future[TransferReport] | None = None

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        self._seals(version, self._engine.lineage)
        return await self._wire.send(self._rank, checksum(self._engine.lineage))

    async def keep(self, version: PolicyVersion) -> None:
        await self.sent()
        self._seals(version, self._engine.lineage)
        weights = checksum(self._engine.lineage)
        self._sending = asyncio.ensure_future(self._wire.send(self._rank, weights))

    async def sent(self) -> None:
        if self._sending is not None:
            sending, self._sending = self._sending, None
            await sending


class TrainerRoot:
    """The root of a simulated trainer rank's worker."""

    def __init__(
        self,
        engine: FaultyTrainer,
        wire: Wire,
        rank: int,
        seals: Callable[[PolicyVersion, Lineage], None],
    ) -> None:
        self.engine = engine
        self.sender = Sender(engine, wire, rank, seals)
