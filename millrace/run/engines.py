"""The workers and engines of a configuration: start, build and connect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from millrace.config import Config
from millrace.errors import MillraceError
from millrace.observe.progress import Progress
from millrace.observe.watch import Watch
from millrace.observe.watched import WatchedReplica, WatchedSync
from millrace.pipeline.turns import SharedTurns, Turns, turns_of
from millrace.ports import TrainEngine, TransferReport, WeightSync
from millrace.rollout.pool import RolloutPool
from millrace.rollout.roster import Roster
from millrace.run.folder import RunDir
from millrace.run.keeper import Keeper, Starter
from millrace.run.problems import weights_folder
from millrace.runtime.remote import RemoteTrainEngine, first_error
from millrace.runtime.replica import RemoteRolloutEngine
from millrace.runtime.roster_sync import RosterSync
from millrace.runtime.rpc import Peer, Runtime
from millrace.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class Engines:
    """The built engines of a run, each in its worker."""

    train: RemoteTrainEngine
    pool: RolloutPool
    turns: Turns
    sync: RosterSync
    keeper: Keeper

    def watched(self, watch: Watch) -> WatchedEngines:
        """Return the engines of a run that `watch` sees. Replica i is the track `rollout-i`."""
        engines = enumerate(self.pool.engines)
        pool = RolloutPool(
            [WatchedReplica(e, f"rollout-{i}", watch) for i, e in engines],
            self.pool.roster,
            deadline_s=self.pool.deadline_s,
        )
        turns = turns_of(isinstance(self.turns, SharedTurns), pool, self.train)
        return WatchedEngines(watch, self.train, pool, turns, WatchedSync(self.sync, watch))

    async def publish(self, version: PolicyVersion) -> tuple[TransferReport, float]:
        """Make the train engine's weights live on every replica, in a turn of the trainer.

        Returns the transfer's report and the seconds of the pause.
        """
        async with self.turns.trainers():
            await self.turns.make_room()
            report = await self.sync.transfer(version)
            return report, await self.sync.activate(version)


@dataclass(frozen=True, slots=True)
class WatchedEngines:
    """The engines of a run, and the watch that sees their calls."""

    watch: Watch
    train: TrainEngine
    pool: RolloutPool
    turns: Turns
    sync: WeightSync


@asynccontextmanager
async def open_runtime(
    config: Config, run: RunDir, *, rollout: bool = True
) -> AsyncIterator[Runtime]:
    """Open the runtime that the configuration names, and close it with its workers at exit.

    A runtime is imported only when it is used.
    """
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


@dataclass(frozen=True, slots=True)
class Replicas:
    """Starts the workers of replicas anew, as the run started them."""

    runtime: Runtime
    tree: dict[str, Any]
    folder: str
    address: tuple[str, int]

    async def start(self, replica: int, started: Callable[[Peer], None]) -> Peer:
        peer = await self.runtime.start(f"rollout-{replica}", "rollout", replica)
        started(peer)
        try:
            await _build(peer, self.tree, self.folder)
            await peer.call("connect", (self.tree, replica, self.address))
        except BaseException:
            await self.runtime.end(peer)
            raise
        return peer

    async def end(self, peer: Peer) -> None:
        await self.runtime.end(peer)


@asynccontextmanager
async def open_engines(
    runtime: Runtime,
    config: Config,
    run: RunDir,
    rollout: bool,
    restarts: bool,
    progress: Progress,
) -> AsyncIterator[Engines]:
    """Build every engine, and keep the replicas going while the body runs."""
    engines = await build_engines(runtime, config, run, rollout=rollout, restarts=restarts)
    engines.keeper.news.note = progress.note
    async with engines.keeper:
        yield engines


async def build_engines(
    runtime: Runtime,
    config: Config,
    run: RunDir,
    *,
    rollout: bool = True,
    restarts: bool = False,
) -> Engines:
    """Build every engine and connect the weight sync.

    All workers start at once, and all engines are built at once. vLLM on shared devices is the
    exception: it allocates the memory that is free. So the train engine is built first and frees
    its memory. With `restarts`, a lost replica is started anew, and a later sync must bring it the
    weights.
    """
    ranks, replicas = range(config.trainer_ranks), range(config.replicas if rollout else 0)
    peers = await asyncio.gather(
        *(runtime.start(f"trainer-{r}", "trainer", r) for r in ranks),
        *(runtime.start(f"rollout-{r}", "rollout", r) for r in replicas),
    )
    trainers, rollouts = peers[: len(ranks)], peers[len(ranks) :]
    address = await trainers[0].call("listen", (), tuple[str, int])
    tree, folder = config.model_dump(mode="json"), weights_folder(config.model, run.model)
    shared = config.schedule.colocated and rollout
    starter = Replicas(runtime, tree, folder, address)
    engines = engines_of(config, trainers, rollouts, shared, restarts=restarts, starter=starter)

    def build_trainers() -> list[Coroutine[Any, Any, None]]:
        return [_build(p, tree, folder, r, address) for r, p in enumerate(trainers)]

    def build_rollouts() -> list[Coroutine[Any, Any, None]]:
        return [_build(p, tree, folder) for p in rollouts]

    if shared and config.rollout.engine == "vllm":
        await first_error(trainers, build_trainers())
        await engines.turns.lend(first_error(rollouts, build_rollouts()))
    else:
        await first_error(peers, [*build_trainers(), *build_rollouts()])
    if rollout:
        ends = [*enumerate(trainers), *enumerate(rollouts)]
        await first_error(peers, [p.call("connect", (tree, r, address)) for r, p in ends])
        await engines.sync.connect()
    return engines


def engines_of(
    config: Config,
    trainers: list[Peer],
    rollouts: list[Peer],
    shared: bool,
    *,
    restarts: bool,
    starter: Starter,
) -> Engines:
    """Return the engines in these workers. The sides take turns on `shared` devices.

    vLLM takes the memory that is free, and on shared devices the trainer may have it. So vLLM does
    not start anew there.
    """
    c, deadline_s = config.rollout, config.trainer.wait_deadline_s
    restarts = restarts and not (shared and c.engine == "vllm")
    roster = Roster(len(rollouts), max_restarts=c.max_restarts if restarts else 0)
    replicas = [RemoteRolloutEngine(peer, stall_s=c.stall_s) for peer in rollouts]
    train, pool = RemoteTrainEngine(trainers), RolloutPool(replicas, roster, deadline_s=deadline_s)
    turns = turns_of(shared, pool, train)
    sync = RosterSync(trainers, replicas, roster, deadline_s=deadline_s)
    keeper = Keeper(roster, replicas, starter, heartbeat_s=c.heartbeat_s)
    return Engines(train, pool, turns, sync, keeper)


async def _build(worker: Peer, tree: dict[str, Any], *where: Any) -> None:
    """Build a worker's engine, and check that the worker got every setting.

    A setting that does not arrive would change the run silently. Raises MillraceError.
    """
    received = await worker.call("build", (tree, *where), dict[str, Any])
    sent, arrived = _leaves(tree), _leaves(received)
    if different := [
        key
        for key in sorted(sent | arrived)
        if sent.get(key, "no such key") != arrived.get(key, "no such key")
    ]:
        differences = "; ".join(
            f"{key} = {arrived.get(key, 'missing')!r}, here {sent.get(key, 'missing')!r}"
            for key in different
        )
        raise MillraceError(
            f"{worker.name} has another configuration: {differences}. "
            "Fix: install the same millrace on every node"
        )


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= (
            _leaves(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return leaves
