"""Workers and engines of a configuration: started, built, connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from millrace.config import Config
from millrace.errors import MillraceError
from millrace.pipeline.turns import Turns, turns_of
from millrace.ports import TransferReport
from millrace.rollout.pool import RolloutPool
from millrace.run.folder import RunDir
from millrace.run.problems import weights_folder
from millrace.runtime.remote import (
    RemoteRolloutEngine,
    RemoteTrainEngine,
    RemoteWeightSync,
    first_error,
)
from millrace.runtime.rpc import Peer, Runtime
from millrace.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class Engines:
    """Workers with engines in them."""

    train: RemoteTrainEngine
    pool: RolloutPool
    turns: Turns
    sync: RemoteWeightSync

    async def publish(self, version: PolicyVersion) -> tuple[TransferReport, float]:
        """Make the train engine's weights live on every replica, in a turn of the trainer.

        Returns the transfer's report and the seconds of the pause.
        """
        async with self.turns.trainers():
            await self.turns.make_room()
            report = await self.sync.transfer(version)
            return report, await self.sync.activate(version)


@asynccontextmanager
async def open_runtime(
    config: Config, run: RunDir, *, rollout: bool = True
) -> AsyncIterator[Runtime]:
    """The runtime that the configuration names, with its workers ended at the end. Imported here, at first use."""
    runtime: Any
    if config.trainer.runtime == "ray":
        from millrace.runtime.ray import RayRuntime

        runtime = await RayRuntime.open(config.sides, run.logs)
    else:
        from millrace.runtime.local import LocalRuntime, check_devices, visible_gpus

        gpus = visible_gpus() if config.trainer.device != "cpu" else []
        check_devices(config.sides, gpus, rollout=rollout)
        runtime = LocalRuntime(run.logs, config.sides, gpus=gpus)
    try:
        yield runtime
    finally:
        await runtime.close()


async def build_engines(
    runtime: Runtime, config: Config, run: RunDir, *, rollout: bool = True
) -> Engines:
    """Build every engine and connect the weight sync. Workers are started at once and built at once, but for vLLM on shared devices:
    it takes what memory it finds, so the train engine is built first and gives way.
    """
    ranks, replicas = range(config.trainer_ranks), range(config.replicas if rollout else 0)
    peers = await asyncio.gather(
        *(runtime.start(f"trainer-{r}", "trainer", r) for r in ranks),
        *(runtime.start(f"rollout-{r}", "rollout", r) for r in replicas),
    )
    trainers, rollouts = peers[: len(ranks)], peers[len(ranks) :]
    address = await trainers[0].call("listen", (), tuple[str, int])
    tree, folder = config.model_dump(mode="json"), weights_folder(config.model.path, run.model)
    train, pool = (
        RemoteTrainEngine(trainers),
        RolloutPool([RemoteRolloutEngine(p) for p in rollouts]),
    )
    shared = config.schedule.colocated and rollout
    turns = turns_of(shared, pool, train)
    engines = Engines(train, pool, turns, RemoteWeightSync(trainers, rollouts))

    def ours() -> list[Coroutine[Any, Any, None]]:
        return [_build(p, tree, folder, r, address) for r, p in enumerate(trainers)]

    def theirs() -> list[Coroutine[Any, Any, None]]:
        return [_build(p, tree, folder) for p in rollouts]

    if shared and config.rollout.engine == "vllm":
        await first_error(trainers, ours())
        await turns.lend(first_error(rollouts, theirs()))
    else:
        await first_error(peers, [*ours(), *theirs()])
    if rollout:
        ends = [*enumerate(trainers), *enumerate(rollouts)]
        await first_error(peers, [p.call("connect", (tree, r, address)) for r, p in ends])
    return engines


async def _build(worker: Peer, tree: dict[str, Any], *where: Any) -> None:
    """Build a worker's engine, and see that every setting got there: what is lost on the way would change a run unseen."""
    found = await worker.call("build", (tree, *where), dict[str, Any])
    own, other = _leaves(tree), _leaves(found)
    if lost := [
        key
        for key in sorted(own | other)
        if own.get(key, "no such key") != other.get(key, "no such key")
    ]:
        told = "; ".join(
            f"{key} = {other.get(key, 'missing')!r}, here {own.get(key, 'missing')!r}"
            for key in lost
        )
        raise MillraceError(
            f"{worker.name} has another configuration: {told}. Fix: the same millrace on every node"
        )


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= (
            _leaves(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return leaves
