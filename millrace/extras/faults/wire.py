"""The place where the ends of a simulated weight sync meet."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from millrace.errors import BrokenTransfer, SyncError
from millrace.simulate.cost import CostModel
from millrace.types import PolicyVersion
from millrace.waits.registry import Wait, doing, waiting

T = TypeVar("T")
_CLOSED = "a weight transfer broke off: connection closed by peer"


@dataclass(slots=True)
class Parcel:
    """The rows of one rank on their way to one replica."""

    weights: int
    sent: int
    """The sender's checksum. Damage on the way changes `weights` alone."""
    staged: asyncio.Future[bool]
    """Whether the receiver has staged the version whole."""


class Groups:
    """The process groups of one generation, from every rank to every member."""

    def __init__(self, ends: Sequence[str]) -> None:
        self.ends = ends
        self.boxes = {end: asyncio.Queue[Parcel]() for end in ends}
        self.here: set[str] = set()
        self._come = {end: asyncio.Event() for end in ends}
        self.broken = asyncio.Event()

    def come(self, name: str) -> None:
        """Note that an end has come."""
        self.here.add(name)
        if name in self._come:
            self._come[name].set()

    async def comes(self, name: str) -> None:
        """Wait until an end has come."""
        await self._come[name].wait()


class Wire:
    """The place where the ends of a weight sync meet, generation by generation."""

    def __init__(self, ranks: int, cost: CostModel, timeout_s: float) -> None:
        self.damage = False
        """Whether the next parcel loses a bit."""
        self._ranks = [f"trainer-{r}" for r in range(ranks)]
        self.transfer_s, self._timeout_s = cost.transfer_s, timeout_s
        self._groups: dict[int, Groups] = {}
        self._joined: dict[str, int] = {}

    def break_off(self, name: str) -> None:
        """Close the groups of a process, because it is dead or leaves them."""
        generation = self._joined.pop(name, None)
        if generation is not None:
            self._groups[generation].broken.set()

    async def join(self, name: str, generation: int, members: Sequence[int]) -> None:
        """Leave the old groups, and wait for all ends of a new generation."""
        self.break_off(name)
        ends = [*self._ranks, *(f"rollout-{k}" for k in members)]
        groups, self._joined[name] = self._groups.setdefault(generation, Groups(ends)), generation
        groups.come(name)
        try:
            async with asyncio.timeout(self._timeout_s):
                for end in ends:
                    with waiting(end, "meeting", "the weight sync", generation):
                        await groups.comes(end)
        except TimeoutError:
            absent = ", ".join(sorted({*groups.ends} - groups.here))
            raise SyncError(f"{absent} did not come within sync.timeout_s") from None

    async def send(self, name: str, version: PolicyVersion, weights: int) -> bool:
        """Send a version to every replica of the group. Return whether all of them staged it.

        As with real groups, a send ends only once every replica has taken part in it.
        """
        groups, loop, parcels = self._of(name), asyncio.get_running_loop(), []
        await asyncio.sleep(self.transfer_s)
        if groups.broken.is_set():  # Meanwhile the sender may have other groups.
            raise BrokenTransfer(_CLOSED)
        for end, box in groups.boxes.items():
            if end not in self._ranks:
                wrong, self.damage = self.damage, False
                parcels.append(Parcel(weights ^ wrong, weights, loop.create_future()))
                box.put_nowait(parcels[-1])
        with _member("rollout-*", self._ranks.index(name), version):
            return all(await self._unbroken(groups, _staged(parcels)))

    async def hang(self, name: str) -> None:
        """Send nothing. Raises BrokenTransfer once the groups break, or time is up."""
        with doing("a copy that does not end"):
            await self._unbroken(self._of(name), asyncio.Event().wait())

    async def receive(self, name: str, version: PolicyVersion) -> int:
        """Return the weights that arrive. Raises SyncError if they break off or are damaged."""
        groups = self._of(name)
        parcels = await self._unbroken(groups, self._parcels(groups.boxes[name], version))
        whole = all(p.weights == p.sent for p in parcels)
        for parcel in parcels:
            if not parcel.staged.done():
                parcel.staged.set_result(whole)
        if not whole:
            raise SyncError(f"{name}: received weights of version {version} are not the trainer's")
        return parcels[0].weights

    async def _unbroken(self, groups: Groups, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises BrokenTransfer if the groups break before."""
        task = asyncio.ensure_future(work)
        tasks: list[asyncio.Future[Any]] = [task, asyncio.ensure_future(groups.broken.wait())]
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise BrokenTransfer("a transfer broke off: timed out (sync.timeout_s)") from None
        finally:
            for one in tasks:
                one.cancel()
        if not task.done() or task.cancelled():
            raise BrokenTransfer(_CLOSED)
        return task.result()

    async def _parcels(self, box: asyncio.Queue[Parcel], version: PolicyVersion) -> list[Parcel]:
        parcels = []
        for rank in range(len(self._ranks)):
            with _member(f"trainer-{rank}", rank, version):
                parcels.append(await box.get())
        return parcels

    def _of(self, name: str) -> Groups:
        """Return the groups of an end. Raises BrokenTransfer if they are closed."""
        groups = self._groups.get(self._joined.get(name, -1))
        if groups is None or groups.broken.is_set():
            raise BrokenTransfer(_CLOSED)
        return groups


def _member(whom: str, rank: int, version: PolicyVersion) -> Wait:
    sync = f"the weight sync of trainer rank {rank}"
    return waiting(whom, f"bucket 1 of version {version}", sync, version)


async def _staged(parcels: Sequence[Parcel]) -> list[bool]:
    return [await parcel.staged for parcel in parcels]
