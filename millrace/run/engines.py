"""The workers and engines of a configuration: start, build and connect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from millrace.config import Config, Sides
from millrace.errors import DeadlineError, MillraceError, SyncError, WorkerError
from millrace.observe.files import flat
from millrace.pipeline.turns import DeviceSharing, Publisher, turns_of
from millrace.ports import TransferReport
from millrace.process.rpc import Limit, Peer, Runtime, first_error
from millrace.replicas.pool import RolloutPool
from millrace.replicas.replica import RemoteRolloutEngine
from millrace.replicas.roster import Roster
from millrace.replicas.scaling import Scaler
from millrace.replicas.supervisor import ReplicaSupervisor
from millrace.replicas.trainer_group import TrainerGroup, WorkerLauncher
from millrace.replicas.weight_sync import WeightSyncDriver
from millrace.run.folder import RunDir
from millrace.run.problems import weights_folder
from millrace.sync.options import SyncOptions
from millrace.types import PolicyVersion
from millrace.waits.registry import Start, starting

T = TypeVar("T")
Address = tuple[str, int]
_ANSWER_S = 10.0
"""Time limit for a worker to say how it started, in seconds."""


@dataclass(frozen=True, slots=True)
class Engines:
    """The built engines of a run, each in its worker."""

    train: TrainerGroup
    pool: RolloutPool
    turns: DeviceSharing
    sync: WeightSyncDriver
    keeper: ReplicaSupervisor
    scaler: Scaler

    async def starts(self) -> dict[str, list[Start]]:
        """Return the parts of the start of every process of every worker that answers."""

        async def of(peer: Peer) -> dict[str, list[Start]]:
            kind, found = dict[str, list[Start]], dict[str, list[Start]]()
            with suppress(WorkerError, DeadlineError):  # a report does not end a run
                found = await peer.call("starts", (), kind, deadline_s=_ANSWER_S)
            return found

        peers = [*self.train.peers, *(e.peer for e in self.keeper.engines)]
        return {k: v for each in await asyncio.gather(*map(of, peers)) for k, v in each.items()}

    async def publish(self, version: PolicyVersion) -> tuple[TransferReport, float]:
        """Make the train engine's weights live on every replica, in a turn of the trainer.

        Returns the transfer's report and the seconds of the pause.
        """
        publisher = Publisher(self.turns, self.sync)
        async with self.turns.trainer_turn():
            return await publisher.transfer(version), await publisher.activate(version)


@asynccontextmanager
async def open_runtime(
    sides: Sides,
    logs: Path,
    *,
    nccl: bool = True,
    rollout: bool = True,
    note: Callable[[str], None] = lambda text: None,
) -> AsyncIterator[Runtime]:
    """Open the runtime that the configuration names, and close it with its workers at exit.

    A runtime is imported only when it is used. `note` gets what its user should know.
    """
    runtime: Any
    if sides.trainer.runtime == "ray":
        from millrace.runtime.ray import RayRuntime

        runtime = await RayRuntime.open(sides, logs, note)
    else:
        from millrace.runtime.local import LocalRuntime, check_devices, visible_gpus

        gpus = visible_gpus() if sides.trainer.device != "cpu" else []
        check_devices(sides, gpus, rollout=rollout, nccl=nccl)
        runtime = LocalRuntime(logs, sides, gpus=gpus)
    try:
        yield runtime
    finally:
        await runtime.close()


class Workers:
    """Starts the workers of replicas and ranks anew, as the run started them."""

    def __init__(
        self,
        runtime: Runtime,
        tree: dict[str, Any],
        folder: str,
        agreed: SyncOptions,
        address: Address,
    ) -> None:
        """`address` is where the ends of the weight sync meet, a store of rank 0."""
        self._runtime, self._tree, self._folder = runtime, tree, folder
        self._agreed = agreed
        self._address: Address | None = address
        """None while the ranks are lost."""
        self._met: dict[Peer, Address] = {}
        """Where each replica was told to meet the ranks."""
        self._meeting: set[Peer] = set()
        """New replicas that meet the ranks now."""

    async def start(self, replica: int, started: Callable[[Peer], None]) -> Peer:
        peer = await self._runtime.start(f"rollout-{replica}", "rollout", replica)
        started(peer)
        try:
            await _build(peer, self._tree, self._folder)
            if self._address is not None:  # Otherwise, the next sync lets them meet.
                self._meeting.add(peer)
                await self.meet(replica, peer)
        except BaseException:
            await self._runtime.end(peer)
            raise
        finally:
            self._meeting.discard(peer)
        return peer

    async def start_ranks(self, started: Callable[[Peer], None]) -> list[Peer]:
        async def start(rank: int) -> Peer:
            peer = await self._runtime.start(f"trainer-{rank}", "trainer", rank)
            started(peer)
            return peer

        starts = [asyncio.ensure_future(start(rank)) for rank in range(self._agreed.ranks)]
        await asyncio.gather(*starts, return_exceptions=True)  # Nothing of a failure goes on.
        peers = [started.result() for started in starts]
        address = await peers[0].call("listen", (), Address)
        await first_error(peers, self.build_ranks(peers, address))
        await first_error(peers, self.join_ranks(peers, address))
        self._address = address
        return peers

    def build_ranks(self, peers: list[Peer], address: Address) -> list[Coroutine[Any, Any, None]]:
        where = self._tree, self._folder
        return [_build(p, *where, r, address) for r, p in enumerate(peers)]

    def join_ranks(self, peers: list[Peer], address: Address) -> list[Coroutine[Any, Any, None]]:
        return [p.call("connect", (self._agreed, r, address)) for r, p in enumerate(peers)]

    async def meet(self, replica: int, peer: Peer) -> None:
        if (address := self._address) is None:
            raise SyncError(f"{peer.name} has no trainer to meet: its ranks are lost")
        if address != self._met.get(peer):
            await peer.call("connect", (self._agreed, replica, address))
            self._met[peer] = address

    async def end(self, peer: Peer) -> None:
        self._met.pop(peer, None)
        if peer.name.startswith("trainer-"):
            # A dead address would cost a minute for each try to meet the ranks.
            self._address = None
            for meeting in self._meeting:
                meeting.mark_dead(f"the trainer was lost while {meeting.name} met it")
        await self._runtime.end(peer)

    def release(self, replica: int) -> None:
        self._runtime.release(replica)

    async def limit(self) -> Limit:
        return await self._runtime.limit()


async def start_workers(
    runtime: Runtime, sides: Sides, folder: str, rollout: bool = True
) -> list[Peer]:
    """Start every worker at once, those of the trainer first. Each imports its engine.

    The model's `folder` need not be written yet.
    """

    async def start(role: str, index: int, engine: str) -> Peer:
        peer = await runtime.start(f"{role}-{index}", role, index)
        await peer.call("load", (engine, folder))
        return peer

    trainer, replicas = sides.trainer, sides.rollout
    counts = trainer.ranks, replicas.replicas if rollout else 0
    with starting("workers"):
        return await asyncio.gather(
            *(start("trainer", r, trainer.engine) for r in range(counts[0])),
            *(start("rollout", r, replicas.engine) for r in range(counts[1])),
        )


async def build_engines(
    runtime: Runtime,
    config: Config,
    run: RunDir,
    peers: list[Peer] | None = None,
    *,
    restarts: bool = False,
    trains: bool = True,
    note: Callable[[str], None] = lambda text: None,
) -> Engines:
    """Build the engine of every worker and connect the weight sync. `peers` are started workers.

    All engines are built at once. A serving engine on shared devices is the exception: it allocates
    the memory that is free. So the train engine is built first and frees its memory. With `restarts`, a lost
    replica is started anew, and a later sync must bring it the weights. If the run also `trains`,
    so are lost ranks, and replicas may join and leave.
    """
    sides, folder = config.sides, weights_folder(config.model, run.model)
    peers = await start_workers(runtime, sides, folder) if peers is None else peers
    ranks = sides.trainer.ranks
    trainers, rollouts = peers[:ranks], peers[ranks:]
    address = await trainers[0].call("listen", (), tuple[str, int])
    tree = config.model_dump(mode="json")
    starter = Workers(runtime, tree, folder, sync_options(config), address)
    engines = engines_of(
        sides,
        trainers,
        rollouts,
        restarts=restarts,
        starter=starter,
        note=note,
        trains=trains,
        folder=run.path,
    )

    builds = (_build(p, tree, folder) for p in rollouts)
    if sides.colocated and rollouts and sides.rollout.serves:
        await first_error(trainers, starter.build_ranks(trainers, address))
        await engines.turns.run_while_asleep(first_error(rollouts, [*builds]))
    else:
        await first_error(peers, [*starter.build_ranks(trainers, address), *builds])
    if rollouts:
        ends = starter.join_ranks(trainers, address)
        ends += [starter.meet(r, p) for r, p in enumerate(rollouts)]
        await first_error(peers, ends)
        await engines.sync.connect()
    return engines


def sync_options(config: Config) -> SyncOptions:
    model, sync, rollout = config.model, config.sync, config.rollout
    return SyncOptions(
        ranks=config.trainer.ranks,
        devices=rollout.tensor_model_parallel_size,
        bucket_bytes=sync.bucket_mb << 20,
        timeout_s=sync.timeout_s,
        wait_deadline_s=config.trainer.wait_deadline_s,
        stall_s=rollout.stall_s,
        colocated=config.async_training.colocated,
        gloo=sync.backend == "gloo",
        serving=rollout.serves,
        adapter_scale=model.lora_scale if model.lora_rank else None,
    )


def engines_of(
    sides: Sides,
    trainers: list[Peer],
    rollouts: list[Peer],
    *,
    restarts: bool,
    starter: WorkerLauncher,
    note: Callable[[str], None],
    trains: bool = True,
    folder: Path | None = None,
) -> Engines:
    """Return the engines in these workers. Colocated sides take turns on the devices.

    A serving engine takes the memory that is free, and on shared devices the trainer may have it.
    So it does not start anew there.
    """
    c, deadline_s = sides.rollout, sides.trainer.wait_deadline_s
    shared = sides.colocated and bool(rollouts)
    again = sides.trainer.max_restarts if restarts and trains else 0
    restarts = restarts and not (shared and c.serves)
    roster = Roster(len(rollouts), max_restarts=c.max_restarts if restarts else 0)
    moved = roster.extend_waits  # A replica waits for the ranks until it has their weights.
    train = TrainerGroup(
        trainers, starter, max_restarts=again, folder=folder, note=note, moved=moved
    )
    replicas = [RemoteRolloutEngine(peer, stall_s=c.stall_s) for peer in rollouts]
    pool = RolloutPool(replicas, roster, deadline_s=deadline_s)
    sync = WeightSyncDriver(train, replicas, roster, deadline_s=deadline_s)
    keeper = ReplicaSupervisor(roster, replicas, train, heartbeat_s=c.heartbeat_s, note=note)
    alone = "replicas join and leave in a run of `millrace train` alone"
    fixed = "" if restarts and trains and rollouts else alone
    if shared:
        why = "in this mode the replicas share the trainer's devices"
        fixed = f"{why}. Fix: a mode with separate devices"
    scaler = Scaler(keeper, most=max(len(rollouts), c.max_replicas), fixed=fixed, note=note)
    return Engines(train, pool, turns_of(shared, pool, train), sync, keeper, scaler)


async def _build(worker: Peer, tree: dict[str, Any], *where: Any) -> None:
    """Build a worker's engine, and check that the worker got every setting.

    A setting that does not arrive would change the run silently. Raises MillraceError.
    """
    received = await worker.call("build", (tree, *where), dict[str, Any])
    sent, arrived = dict(flat(tree)), dict(flat(received))
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
