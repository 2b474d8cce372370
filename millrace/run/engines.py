"""The workers and engines of a configuration: start, build and connect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from millrace.config import Config, Sides
from millrace.errors import DeadlineError, MillraceError, SyncError, WorkerError
from millrace.observe.progress import Progress
from millrace.pipeline.turns import DeviceSharing, Publisher, turns_of
from millrace.ports import TransferReport
from millrace.rollout.pool import RolloutPool
from millrace.rollout.roster import Roster
from millrace.run.folder import RunDir
from millrace.run.problems import weights_folder
from millrace.run.scaling import Scaler
from millrace.run.supervisor import ReplicaLauncher, ReplicaSupervisor
from millrace.runtime.recovering import RecoveringTrainEngine
from millrace.runtime.remote import first_error
from millrace.runtime.replica import RemoteRolloutEngine
from millrace.runtime.roster_sync import RosterSync
from millrace.runtime.rpc import Limit, Peer, Runtime
from millrace.runtime.trainer_group import RankLauncher, TrainerGroup
from millrace.types import PolicyVersion
from millrace.waits.registry import Start, starting
from millrace.waits.wait_server import FOLDER

T = TypeVar("T")
Address = tuple[str, int]
_ANSWER_S = 10.0
"""Time limit for a worker to say how it started, in seconds."""


class WorkerLauncher(ReplicaLauncher, RankLauncher, Protocol):
    """Starts and ends the workers of both sides."""


@dataclass(frozen=True, slots=True)
class Engines:
    """The built engines of a run, each in its worker."""

    train: RecoveringTrainEngine
    pool: RolloutPool
    turns: DeviceSharing
    sync: RosterSync
    keeper: ReplicaSupervisor
    scaler: Scaler
    replicas: list[RemoteRolloutEngine]

    async def starts(self) -> dict[str, list[Start]]:
        """Return the parts of the start of every process of every worker that answers."""

        async def of(peer: Peer) -> dict[str, list[Start]]:
            kind, found = dict[str, list[Start]], dict[str, list[Start]]()
            with suppress(WorkerError, DeadlineError):  # a report does not end a run
                found = await peer.call("starts", (), kind, deadline_s=_ANSWER_S)
            return found

        peers = [*self.train.ranks.peers, *(e.peer for e in self.replicas)]
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
    config: Config,
    run: RunDir,
    *,
    rollout: bool = True,
    note: Callable[[str], None] = lambda text: None,
) -> AsyncIterator[Runtime]:
    """Open the runtime that the configuration names, and close it with its workers at exit.

    A runtime is imported only when it is used. `note` gets what its user should know.
    """
    runtime: Any
    if config.trainer.runtime == "ray":
        from millrace.runtime.ray import RayRuntime

        runtime = await RayRuntime.open(config.sides, run.logs, note)
    else:
        from millrace.runtime.local import LocalRuntime, check_devices, visible_gpus

        gpus = visible_gpus() if config.trainer.device != "cpu" else []
        check_devices(config.sides, gpus, rollout=rollout, nccl=config.sync.backend == "auto")
        runtime = LocalRuntime(run.logs, config.sides, gpus=gpus)
    try:
        yield runtime
    finally:
        await runtime.close()


class Workers:
    """Starts the workers of replicas and ranks anew, as the run started them."""

    def __init__(
        self, runtime: Runtime, tree: dict[str, Any], folder: str, ranks: int, address: Address
    ) -> None:
        """`address` is where the ends of the weight sync meet, a store of rank 0."""
        self._runtime, self._tree, self._folder = runtime, tree, folder
        self._ranks = ranks
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
        starts = (self._start_rank(rank, started) for rank in range(self._ranks))
        peers = await all_ended(starts)
        address = await peers[0].call("listen", (), Address)
        where = self._tree, self._folder
        await first_error(peers, [_build(p, *where, r, address) for r, p in enumerate(peers)])
        join = [p.call("connect", (self._tree, r, address)) for r, p in enumerate(peers)]
        await first_error(peers, join)
        self._address = address
        return peers

    async def _start_rank(self, rank: int, started: Callable[[Peer], None]) -> Peer:
        peer = await self._runtime.start(f"trainer-{rank}", "trainer", rank)
        started(peer)
        return peer

    async def meet(self, replica: int, peer: Peer) -> None:
        if (address := self._address) is None:
            raise SyncError(f"{peer.name} has no trainer to meet: its ranks are lost")
        if address != self._met.get(peer):
            await peer.call("connect", (self._tree, replica, address))
            self._met[peer] = address

    async def end(self, peer: Peer) -> None:
        self._met.pop(peer, None)
        if peer.name.startswith("trainer-"):
            self._forget_ranks()
        await self._runtime.end(peer)

    def _forget_ranks(self) -> None:
        """Forget where replicas meet the ranks. A dead address would cost a minute for each try."""
        self._address = None
        for peer in self._meeting:
            peer.mark_dead(f"the trainer was lost while {peer.name} met it")

    def release(self, replica: int) -> None:
        self._runtime.release(replica)

    async def limit(self) -> Limit:
        return await self._runtime.limit()


async def all_ended(work: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results once all have ended, so that nothing of a failure goes on. Raises it."""
    ended = await asyncio.gather(*work, return_exceptions=True)
    for one in ended:
        if isinstance(one, BaseException):
            raise one
    return [one for one in ended if not isinstance(one, BaseException)]


@asynccontextmanager
async def open_engines(
    runtime: Runtime,
    config: Config,
    run: RunDir,
    peers: list[Peer],
    trains: bool,
    progress: Progress,
) -> AsyncIterator[Engines]:
    """Build every engine, and keep the replicas going while the body runs.

    A run that `trains` has lost ranks started anew too.
    """
    with starting("engines"):
        engines = await build_engines(runtime, config, run, peers, restarts=True, trains=trains)
    engines.keeper.news.note = engines.train.ranks.note = progress.note
    engines.train.folder = run.path
    scaler = engines.scaler
    scaler.note = progress.note
    engines.keeper.scaling = partial(scaler.serve, run.path / FOLDER), scaler.follow
    async with engines.keeper:
        yield engines


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
) -> Engines:
    """Build the engine of every worker and connect the weight sync. `peers` are started workers.

    All engines are built at once. vLLM on shared devices is the exception: it allocates the memory
    that is free. So the train engine is built first and frees its memory. With `restarts`, a lost
    replica is started anew, and a later sync must bring it the weights. If the run also `trains`,
    so are lost ranks, and replicas may join and leave.
    """
    ranks, folder = range(config.trainer_ranks), weights_folder(config.model, run.model)
    peers = await start_workers(runtime, config.sides, folder) if peers is None else peers
    trainers, rollouts = peers[: len(ranks)], peers[len(ranks) :]
    rollout = bool(rollouts)
    address = await trainers[0].call("listen", (), tuple[str, int])
    tree = config.model_dump(mode="json")
    shared = config.schedule.colocated and rollout
    starter = Workers(runtime, tree, folder, len(ranks), address)
    engines = engines_of(
        config, trainers, rollouts, shared, restarts=restarts, trains=trains, starter=starter
    )

    def build_trainers() -> list[Coroutine[Any, Any, None]]:
        return [_build(p, tree, folder, r, address) for r, p in enumerate(trainers)]

    def build_rollouts() -> list[Coroutine[Any, Any, None]]:
        return [_build(p, tree, folder) for p in rollouts]

    if shared and config.rollout.engine == "vllm":
        await first_error(trainers, build_trainers())
        await engines.turns.run_while_asleep(first_error(rollouts, build_rollouts()))
    else:
        await first_error(peers, [*build_trainers(), *build_rollouts()])
    if rollout:
        ends = [p.call("connect", (tree, r, address)) for r, p in enumerate(trainers)]
        ends += [starter.meet(r, p) for r, p in enumerate(rollouts)]
        await first_error(peers, ends)
        await engines.sync.connect()
    return engines


def engines_of(
    config: Config,
    trainers: list[Peer],
    rollouts: list[Peer],
    shared: bool,
    *,
    restarts: bool,
    starter: WorkerLauncher,
    trains: bool = True,
) -> Engines:
    """Return the engines in these workers. The sides take turns on `shared` devices.

    vLLM takes the memory that is free, and on shared devices the trainer may have it. So vLLM does
    not start anew there.
    """
    c, deadline_s = config.rollout, config.trainer.wait_deadline_s
    again = config.trainer.max_restarts if restarts and trains else 0
    ranks = TrainerGroup(trainers, starter, max_restarts=again)
    restarts = restarts and not (shared and c.engine == "vllm")
    roster = Roster(len(rollouts), max_restarts=c.max_restarts if restarts else 0)
    ranks.moved = roster.extend_waits  # A replica waits for the ranks until it has their weights.
    replicas = [RemoteRolloutEngine(peer, stall_s=c.stall_s) for peer in rollouts]
    train, pool = RecoveringTrainEngine(ranks), RolloutPool(replicas, roster, deadline_s=deadline_s)
    turns = turns_of(shared, pool, train)
    sync = RosterSync(ranks, replicas, roster, deadline_s=deadline_s)
    keeper = ReplicaSupervisor(roster, replicas, ranks, starter, heartbeat_s=c.heartbeat_s)
    alone = "replicas join and leave in a run of `millrace train` alone"
    fixed = "" if restarts and trains and rollouts else alone
    if shared:
        why = "in this mode the replicas share the trainer's devices"
        fixed = f"{why}. Fix: a mode with separate devices"
    most = max(len(rollouts), c.max_replicas)
    scaler = Scaler(keeper, replicas, pool.add, most=most, fixed=fixed)
    return Engines(train, pool, turns, sync, keeper, scaler, replicas)


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
