"""Trainer ranks and replicas, connected over real gloo groups as workers connect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.config import Config
from millrace.ports import TransferReport
from millrace.run.engines import sync_options
from millrace.sync.collective import Receiver, Sender, join_sender
from millrace.sync.options import SyncOptions
from millrace.sync.table import Shards
from tests.waiting import HANG_S

TRAINERS, REPLICAS = 2, 2


def model(seed: int) -> dict[str, Tensor]:
    """Return float32 and bfloat16 tensors. The rows of one trainer rank fill two 1 MiB buckets."""
    noise = torch.Generator().manual_seed(seed)
    shapes = {
        "embed": (700, 512),
        "layer.0.w": (300, 200),
        "layer.0.b": (200,),
        "layer.1.w": (512, 400),
        "layer.1.b": (7,),
        "norm": (1,),
    }
    tensors = {name: torch.randn(shape, generator=noise) for name, shape in shapes.items()}
    return tensors | {"head": torch.randn(511, 301, generator=noise).to(torch.bfloat16)}


def large(seed: int) -> dict[str, Tensor]:
    """Return a model of 45 buckets, more than the buffers of a connection take."""
    noise = torch.Generator().manual_seed(seed)
    return model(seed) | {f"more.{i}": torch.randn(1 << 18, generator=noise) for i in range(40)}


@dataclass
class Source:
    """The weights of one trainer rank: the rows that FSDP2 would give it.

    TRAINERS ranks share one copy of the model. Ranks of other copies send no rows.
    """

    tensors: dict[str, Tensor]
    rank: int
    device = torch.device("cpu")

    def shards(self) -> Shards:
        for name, tensor in self.tensors.items():
            chunks, firsts = torch.chunk(tensor, TRAINERS), [0]
            firsts += torch.tensor([len(chunk) for chunk in chunks]).cumsum(0).tolist()
            own = chunks[self.rank] if self.rank < len(chunks) else tensor[:0]
            yield name, tuple(tensor.shape), tensor.dtype, firsts[min(self.rank, len(chunks))], own

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("a transfer between devices gathers nothing")


@dataclass
class Holder:
    """A replica with a correct swap, which copies the staged tensors."""

    live: dict[str, Tensor]
    version: int = 0
    swaps: list[int] = field(default_factory=list)

    def weights(self) -> Mapping[str, Tensor]:
        return self.live

    async def swap(self, version: int, staged: Mapping[str, Tensor]) -> float:
        for name, tensor in self.live.items():
            tensor.copy_(staged[name])
        self.version = version
        self.swaps.append(version)
        return 0.25


class Deaf(Holder):
    """A replica that confirms the new weights but serves the old ones."""

    async def swap(self, version: int, staged: Mapping[str, Tensor]) -> float:
        self.version = version
        return 0.0


class Forgetful(Holder):
    """A replica that copies all new tensors except one."""

    async def swap(self, version: int, staged: Mapping[str, Tensor]) -> float:
        kept = self.live["layer.0.b"].clone()
        paused = await super().swap(version, staged)
        self.live["layer.0.b"].copy_(kept)
        return paused


async def regroup(
    senders: Sequence[Any], receivers: Mapping[int, Any], generation: int = 1
) -> list[int | None]:
    """Let all ends join a generation. Return the staged versions."""
    members = sorted(receivers)
    answers = await asyncio.gather(
        *(s.regroup(generation, members) for s in senders),
        *(receivers[i].regroup(generation, members) for i in members),
    )
    return list(answers[len(senders) :])


@dataclass
class Fleet:
    sources: list[Source]
    holders: list[Holder]
    senders: list[Sender]
    receivers: list[Receiver]
    store: Any
    agreed: SyncOptions
    generation: int = 1

    async def regroup(self, members: Sequence[int]) -> list[int | None]:
        """Let `members` alone take part from now on. Return their staged versions."""
        self.generation += 1
        receivers = {i: self.receivers[i] for i in members}
        return await regroup(self.senders, receivers, self.generation)

    async def replace(self, replica: int, holder: Holder) -> None:
        """Put a restarted replica with an empty model in the place of another."""
        self.holders[replica] = holder
        self.receivers[replica] = await Receiver.join(holder, self.store, replica, self.agreed)

    async def transfer(
        self, version: int, members: Sequence[int] = range(REPLICAS)
    ) -> tuple[list[TransferReport], list[TransferReport]]:
        """Transfer a version; return the reports of the senders and those of the receivers.

        A sender blocks its caller, as in a process of its own, so each sender has a thread here.
        """
        sent = [asyncio.to_thread(asyncio.run, s.transfer(version)) for s in self.senders]  # type: ignore[arg-type]
        received = [self.receivers[i].transfer(version) for i in members]
        reports = await asyncio.gather(*sent, *received, return_exceptions=True)
        for report in reports:
            if isinstance(report, BaseException):
                raise report
        return reports[: len(sent)], reports[len(sent) :]  # type: ignore[return-value]

    async def activate(self, version: int, members: Sequence[int] = range(REPLICAS)) -> list[float]:
        return list(await asyncio.gather(*(self.receivers[i].activate(version) for i in members)))


@asynccontextmanager
async def fleet(
    holders: Callable[[int], Holder] = lambda replica: Holder(model(100 + replica)),
    source: Callable[[int], Source] = lambda rank: Source(model(1), rank),
    copies: int = 1,
    rollout: Mapping[str, object] = MappingProxyType({}),
    **sections: Any,
) -> AsyncIterator[Fleet]:
    """Connect two trainer ranks for each copy of the model, and two replicas, as workers do."""
    ranks = TRAINERS * copies
    config = Config(
        trainer={"n_gpus_per_node": ranks, "fsdp_size": TRAINERS},
        rollout={"n_gpus_per_node": REPLICAS, **rollout},
        sync={"bucket_mb": 1, "timeout_s": HANG_S},
        **sections,
    )
    store = dist.HashStore()
    sources = [source(rank) for rank in range(ranks)]
    replicas = [holders(i) for i in range(REPLICAS)]
    joined: Any = await asyncio.gather(
        *(
            join_sender(each, store, rank, sync_options(config))  # type: ignore[arg-type]
            for rank, each in enumerate(sources)
        ),
        *(
            Receiver.join(holder, store, i, sync_options(config))
            for i, holder in enumerate(replicas)
        ),
    )
    await regroup(joined[:ranks], dict(enumerate(joined[ranks:])))
    ends = list(joined[:ranks]), list(joined[ranks:])
    yield Fleet(sources, replicas, *ends, store, sync_options(config))


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())
