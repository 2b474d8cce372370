"""The root objects of simulated workers: engines, and both ends of a weight sync.

The weights of a version are the list of the samples that trained it. A checksum of this list stands
for the tensors. It travels with a sync, is proven, and is saved in checkpoints.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence

import msgspec

from millrace.errors import CopyGone, SyncError
from millrace.extras.faults.disk import SimPath, View
from millrace.extras.faults.wire import Wire
from millrace.ports import Phase, StepReport, TrainBatch, TransferReport
from millrace.simulate.cost import CostModel
from millrace.simulate.engines import SimRolloutEngine, SimTrainEngine
from millrace.types import PolicyVersion, SamplingParams, Segment, Tokens
from millrace.waits.registry import count, doing, gauge, waiting

Lineage = list[int]
"""The ids of the samples that trained the weights, in order."""


def checksum(lineage: Sequence[int]) -> int:
    return zlib.crc32(msgspec.msgpack.encode(lineage))


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

    def __init__(self, engine: FaultyRollouts, wire: Wire, name: str) -> None:
        self.skips = False
        """Whether the next swap leaves the live weights as they are."""
        self._engine, self._wire, self._name = engine, wire, name
        self._staged: tuple[PolicyVersion, int] | None = None

    def meet(self, wire: Wire) -> None:
        """Leave the ranks of a lost trainer, and prepare to join others."""
        self._wire.break_off(self._name)
        self._wire = wire

    def break_off(self, name: str) -> None:
        self._wire.break_off(name)

    async def regroup(self, generation: int, members: list[int]) -> PolicyVersion | None:
        await self._wire.join(self._name, generation, members)
        return self._staged[0] if self._staged else None

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        self._staged = None
        self._staged = version, await self._wire.receive(self._name, version)
        return TransferReport(8, 0.0)

    async def activate(self, version: PolicyVersion) -> float:
        if self._staged is None or self._staged[0] != version:
            raise SyncError(f"{self._name} cannot serve version {version}")
        weights, skips, self.skips = self._staged[1], self.skips, False
        if skips:
            raise SyncError(
                f"{self._name}: live weights of version {version} are not the trainer's"
            )
        paused = await self._engine.swap(version)
        self._engine.weights = weights
        return paused


class RolloutRoot:
    """The root of a simulated replica's worker."""

    def __init__(self, engine: FaultyRollouts, wires: list[Wire], name: str) -> None:
        self.engine = engine
        self.receiver = Receiver(engine, wires[-1], name)
        self._wires = wires

    async def connect(self, wire: int) -> None:
        """Prepare to join the ranks at a wire."""
        self.receiver.meet(self._wires[wire])


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
        self._moves = asyncio.Event()
        self._moves.set()

    def stand_still(self, seconds: float) -> None:
        """Stop all work for `seconds`. Signs of life go on."""
        self._moves.clear()
        asyncio.get_running_loop().call_later(seconds, self._moves.set)

    async def moves(self) -> None:
        """Wait until the rank does not stand still."""
        with doing("a kernel that does not end"):
            await self._moves.wait()

    async def _meet(self) -> None:
        await self.moves()
        await self._ranks.meet()

    def end(self) -> None:
        """End with the process: the collectives break, and what is not written stays unwritten."""
        self._ranks.lose()
        if self._writing is not None:
            self._writing.cancel()

    async def begin(self, phase: Phase, horizon: int) -> None:
        await self._meet()

    async def step(self, batch: TrainBatch) -> StepReport:
        await self._meet()
        with doing("backward of micro-batch 1"):
            report = await super().step(batch)
        count("passes")
        self.trained.clear()
        self.lineage += [sample.prompt.index for sample in batch.samples]
        return report

    async def save(self, folder: str, staged: bool = False) -> None:
        await self.saved()
        await self._meet()
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
        await self._meet()
        self.lineage = msgspec.json.decode(
            SimPath(self._view, f"{folder}/rank-0").read_bytes(), type=Lineage
        )


class Sender:
    """The sending end of one rank."""

    def __init__(
        self,
        engine: FaultyTrainer,
        wire: Wire,
        name: str,
        seals: Callable[[PolicyVersion, Lineage], None],
    ) -> None:
        """`seals` sees each version and the samples that trained its weights."""
        self._engine, self._wire, self._name, self._seals = engine, wire, name, seals
        self.hangs = False
        """Whether it sends nothing from now on. All else works."""
        self._kept: tuple[PolicyVersion, int] | None = None
        self._sending: asyncio.Future[None] | None = None

    async def regroup(self, generation: int, members: list[int]) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        await self._wire.join(self._name, generation, members)

    async def transfer(self, version: PolicyVersion) -> TransferReport:
        self._seals(version, self._engine.lineage)
        if self.hangs:
            await self._wire.hang(self._name)
        await self._wire.send(self._name, version, checksum(self._engine.lineage))
        return TransferReport(8, self._wire.transfer_s)

    async def keep(self, version: PolicyVersion) -> None:
        await self.sent()
        await self._engine.moves()  # The copy is a kernel too.
        self._seals(version, self._engine.lineage)
        self._kept = version, checksum(self._engine.lineage)
        self._start(*self._kept)

    async def resend(self, version: PolicyVersion) -> None:
        if self._kept is None or self._kept[0] != version:
            raise CopyGone(f"version {version} cannot be sent again: its copy is gone")
        self._start(*self._kept)

    def _start(self, version: PolicyVersion, weights: int) -> None:
        self._sending = asyncio.ensure_future(self._send(version, weights))

    async def _send(self, version: PolicyVersion, weights: int) -> None:
        """Send the copy, and free it once all replicas have the version."""
        if self.hangs:
            await self._wire.hang(self._name)
        if await self._wire.send(self._name, version, weights):
            self._kept = None

    async def sent(self) -> None:
        if self._sending is not None:
            sending, self._sending = self._sending, None
            await sending


class TrainerRoot:
    """The root of a simulated trainer rank's worker."""

    def __init__(self, engine: FaultyTrainer, sender: Sender) -> None:
        self.engine = engine
        self.sender = sender
