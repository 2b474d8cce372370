"""Workers as Ray actors in a placement group. Only ray*.py import Ray.

Frames travel through two actor methods, `push` and a long poll `pull`. A step's hundreds of
requests therefore cost a few Ray calls. A bundle is one node's share of both sides, and
STRICT_SPREAD places each bundle on its own node. The placement group reserves the GPUs, and actors
request none: with fractions, Ray could place two ranks on one GPU. The driver gives each actor its
GPUs of the bundle.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from millrace.config import Sides
from millrace.errors import INSTALL, DeadlineError, MissingDependency, WorkerError, bad_value
from millrace.runtime.address import check_reachable
from millrace.runtime.placement import Plan, choose, refusal, threads
from millrace.runtime.processes import kill_process
from millrace.runtime.rpc import Peer
from millrace.waits.answer import Answer

try:
    import ray

    # Ray has no public function for this without the dashboard.
    from ray._private.state import available_resources_per_node
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise MissingDependency(f"trainer.runtime=ray needs Ray. Fix: {INSTALL['ray']}.") from error

from millrace.runtime.ray_host import BEAT, WHY, RayHost
from millrace.runtime.ray_token import NO_TOKEN, asks_for_token, forget_token, fresh_token

GOODBYE_S = 5.0
START_DEADLINE_S = 180.0
PLACEMENT_DEADLINE_S = 60.0
_ANSWER_S = 2.0


@dataclass(slots=True, eq=False)
class _Worker:
    """An actor of one worker, and its process on the node of a bundle."""

    peer: Peer
    role: str
    actor: Any
    node: int
    process: tuple[int, float] | None = None  # its id and the time of its start


@dataclass(frozen=True, slots=True)
class _Share:
    """A bundle, as a process inside it sees it."""

    address: str
    gpus: list[str]  # in the form of CUDA_VISIBLE_DEVICES
    has_folder: bool
    cores: int
    asks_for_token: bool


def _inspect_share(folder: str) -> _Share:
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    cores, has_folder = os.cpu_count() or 1, os.path.isdir(folder)
    return _Share(ray.util.get_node_ip_address(), gpus, has_folder, cores, asks_for_token())


def _join(options: dict[str, Any], token: contextlib.AbstractContextManager[None]) -> None:
    """Call ray.init with SIGTERM and SIGHUP blocked. The processes that Ray starts inherit that.

    Ray itself blocks SIGINT. These signals reach every process of a run, and the driver alone acts
    on them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        with token:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(**options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _restore_sigterm() -> None:
    """Install the driver's own handler again. ray.init replaces it by one that aborts."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _answer(call: Any, name: str, node: str) -> Answer:
    try:
        answer: Answer = ray.get(call, timeout=_ANSWER_S)
    except ray.exceptions.GetTimeoutError:
        return Answer(name, 0, node, silent=True)
    except ray.exceptions.RayError as error:
        return Answer(name, 0, node, silent=True, dead=f"worker {name} on {node} is dead: {error}")
    return answer


class RayRuntime:
    """Start actors in one placement group, and end all of them."""

    def __init__(self, sides: Sides, *, owns_cluster: bool) -> None:
        self._sides = sides
        self._owns_cluster = owns_cluster
        self._kind = "CPU"
        self._plan: Plan
        self._shares: list[_Share] = []
        self._loopback = owns_cluster
        self._group: Any = None
        self._workers: list[_Worker] = []
        self._started = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @classmethod
    async def open(
        cls, sides: Sides, log_dir: Path, note: Callable[[str], None] = lambda text: None
    ) -> RayRuntime:
        """Join the cluster at trainer.ray_address, or start one on this machine. Reserve devices.

        A cluster that starts here has a token of its own. `note` hears of one that asks for none.
        Raise ConfigError if no cluster answers, if it lacks the devices, or if a node does not see
        the run's folder.
        """
        address = sides.trainer.ray_address
        owns_cluster = not address and not ray.is_initialized()
        options: dict[str, Any] = {
            "log_to_driver": False,
            "configure_logging": False,
            "ignore_reinit_error": True,
        }
        if owns_cluster:  # without "local", Ray would join the cluster of RAY_ADDRESS
            cores = max(os.cpu_count() or 1, sides.trainer.ranks + sides.rollout.devices)
            options |= {
                "address": "local",
                "num_cpus": cores,
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
            }
        elif address:
            options |= {"address": address}
        try:
            await check_reachable(
                os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
            )
        except OSError as error:  # a timeout and an unknown host are OSErrors too
            rule = f"no cluster answers: {str(error) or type(error).__name__}"
            raise bad_value(
                "trainer.ray_address",
                address,
                rule,
                "the HOST:PORT that `ray start --head` printed",
            ) from error
        try:
            token = fresh_token() if owns_cluster else contextlib.nullcontext()
            await asyncio.to_thread(_join, options, token)
            _restore_sigterm()
        except (ConnectionError, ray.exceptions.AuthenticationError) as error:
            fix = (
                "`ray start --head`. If the cluster has a token, set RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN for this command too"
            )
            rule = f"millrace cannot join a cluster: {str(error).rstrip('.')}"
            raise bad_value("trainer.ray_address", address, rule, fix) from error
        runtime = cls(sides, owns_cluster=owns_cluster)
        try:
            await runtime._reserve()
            await runtime._inspect(log_dir.resolve())
            if not all(share.asks_for_token for share in runtime._shares):
                note(NO_TOKEN)
        except BaseException:
            await runtime.close()
            raise
        return runtime

    async def _reserve(self) -> None:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self._loopback = self._owns_cluster or all(
            node["NodeManagerAddress"].startswith("127.") for node in nodes
        )
        device = self._sides.trainer.device
        if device != "cpu" and any(node["Resources"].get("GPU") for node in nodes):
            self._kind = "GPU"
        elif device == "cuda":
            raise bad_value(
                "trainer.device", device, "no node of the cluster has a GPU", "trainer.device=auto"
            )
        sizes = [node["Resources"].get(self._kind, 0.0) for node in nodes]
        self._plan = choose(self._sides, self._kind, sizes, self._free())
        bundles = [{self._kind: float(share)} for share in self._plan.shares]
        self._group = placement_group(
            bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK"
        )
        if not await asyncio.to_thread(self._group.wait, PLACEMENT_DEADLINE_S):
            free = ", ".join(f"{math.floor(n)}" for n in sorted(self._free(), reverse=True))
            available = (
                f"in {PLACEMENT_DEADLINE_S:g} s the cluster's nodes had no more than {free} free"
            )
            fix = "end other jobs (`ray status` shows the devices in use), or fewer devices"
            raise refusal(self._sides, self._kind, available, fix)

    def _free(self) -> list[float]:
        return [
            resources.get(self._kind, 0.0) for resources in available_resources_per_node().values()
        ]

    async def _inspect(self, folder: Path) -> None:
        """Ask a process in each bundle for the bundle's GPUs, and whether it sees the run's folder.

        Every node must see the same folder as the driver.
        """
        inspect: Any = ray.remote(_inspect_share)
        on_gpus = self._kind == "GPU"
        calls = [
            inspect.options(
                num_cpus=0,
                num_gpus=share if on_gpus else 0,
                scheduling_strategy=self._bundle(k),
                max_retries=0,
            ).remote(str(folder))
            for k, share in enumerate(self._plan.shares)
        ]
        try:
            self._shares = await asyncio.wait_for(asyncio.gather(*calls), START_DEADLINE_S)
        except TimeoutError:
            raise DeadlineError(
                f"the cluster's nodes started no process within {START_DEADLINE_S:g} s"
            ) from None
        except ray.exceptions.RayError as error:
            fix = "the same Python, millrace and packages on every node"
            raise WorkerError(
                f"a node of the cluster cannot run millrace: {error}. Fix: {fix}"
            ) from error
        if lacking := sorted({share.address for share in self._shares if not share.has_folder}):
            rule = (
                f"the driver's folder is not on {', '.join(lacking)}, and every node reads the "
                "model and writes checkpoints there"
            )
            fix = "a folder on a file system that all nodes share"
            raise bad_value("trainer.run_dir", str(folder.parent), rule, fix)

    def _bundle(self, index: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)

    async def start(self, name: str, role: str, index: int) -> Peer:
        node, devices = self._plan.place(role, index)
        gpus = self._shares[node].gpus[devices]
        share = (devices.stop - devices.start) * (0.5 if self._sides.colocated else 1.0)
        workers = threads(self._sides.trainer, self._shares[node].cores, self._plan.shares[node])
        variables = {
            "OMP_NUM_THREADS": str(workers),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
        }
        groups = {"concurrency_groups": {BEAT: 1, WHY: 1}}
        remote: Any = ray.remote(**cast("Any", groups))(RayHost)
        actor = remote.options(
            name=f"millrace-{os.getpid()}-{name}-{next(self._started)}",
            scheduling_strategy=self._bundle(node),
            runtime_env={"env_vars": variables},
            max_concurrency=1000,
            num_cpus=0 if gpus else share,
        ).remote(name, role, self._loopback, gpus)
        numbers = itertools.count()
        peer = Peer(
            name,
            lambda frame: self._push(peer, actor, next(numbers), frame),
            deadline_s=self._sides.trainer.wait_deadline_s,
        )
        worker = _Worker(peer, role, actor, node)
        self._workers.append(worker)
        address = self._shares[node].address
        self._watch(self._serve(peer, actor, address))
        try:
            worker.process = await asyncio.wait_for(actor.up.remote(), START_DEADLINE_S)
        except TimeoutError:
            await self.end(peer)
            raise DeadlineError(
                f"worker {name} on {address} did not start within {START_DEADLINE_S:g} s"
            ) from None
        except ray.exceptions.RayError as error:
            raise WorkerError(f"worker {name} on {address} is dead: {error}") from error
        self._watch(self._pull(peer, actor, address))
        self._watch(self._beat(peer, actor, address))
        await peer.call("ping", deadline_s=START_DEADLINE_S)
        return peer

    async def end(self, peer: Peer) -> None:
        """Kill the process of a worker and those that it started, and then its actor."""
        worker = next((w for w in self._workers if w.peer is peer), None)
        if worker is None:
            return
        self._workers.remove(worker)
        if worker.process is not None:
            where = self._bundle(worker.node)
            options: Any = {"num_cpus": 0, "scheduling_strategy": where, "max_retries": 0}
            kill: Any = ray.remote(**options)(kill_process)
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # the node may be gone
                await asyncio.wait_for(kill.remote(*worker.process), GOODBYE_S)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(worker.actor)

    def _watch(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the task ends with its actor, and `close` awaits it
        task.add_done_callback(self._tasks.discard)

    def _push(self, peer: Peer, actor: Any, number: int, frame: bytes) -> None:
        if peer.death is None:
            actor.push.remote(number, frame)

    async def _serve(self, peer: Peer, actor: Any, address: str) -> None:
        try:
            await actor.serve.remote()
        except ray.exceptions.RayError as error:
            self._mark_dead(peer, address, error)

    async def _beat(self, peer: Peer, actor: Any, address: str) -> None:
        try:
            while peer.death is None:
                await actor.beat.remote()
                peer.beat()
                await asyncio.sleep(self._sides.rollout.heartbeat_s)
        except ray.exceptions.RayError as error:
            self._mark_dead(peer, address, error)

    async def _pull(self, peer: Peer, actor: Any, address: str) -> None:
        try:
            while True:
                for frame in await actor.pull.remote():
                    peer.receive(frame)
        except ray.exceptions.RayError as error:
            self._mark_dead(peer, address, error)

    def _mark_dead(self, peer: Peer, address: str, error: Exception) -> None:
        peer.mark_dead(
            "the run is over"
            if self._closing
            else f"worker {peer.name} on {address} is dead: {error}"
        )

    def answers(self) -> list[Answer]:
        calls = [
            (w.actor.why.remote(), w.peer.name, self._shares[w.node].address) for w in self._workers
        ]
        return [_answer(*call) for call in calls]

    async def close(self) -> None:
        """Kill the actors and free the devices. Stop the cluster if this run started it."""
        self._closing = True
        # When Ray kills an actor, it also kills Python's tracker of vLLM's shared memory. Each
        # replica would then leave 0.4 GB in /dev/shm. So the engines close first.
        closing = [
            asyncio.ensure_future(worker.peer.call("engine.close", deadline_s=GOODBYE_S))
            for worker in self._workers
            if worker.role == "rollout"
        ]
        await asyncio.gather(*closing, return_exceptions=True)  # a replica may have no engine yet
        for worker in self._workers:
            ray.kill(worker.actor)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        if self._group is not None:
            remove_placement_group(self._group)
        if self._owns_cluster:
            await asyncio.to_thread(ray.shutdown)
            forget_token()
