"""Workers as Ray actors in a placement group: the only file that knows Ray.

Frames travel through two actor methods, `push` and a long poll `pull`, so that a step's hundreds of requests cost a few Ray
calls. A bundle is a node's share of both sides; STRICT_SPREAD puts bundles on nodes of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from pathlib import Path
from typing import Any

from millrace.config import Config, nodes_needed, sides_share_nodes
from millrace.errors import MissingDependency, bad_value
from millrace.runtime.host import Host
from millrace.runtime.rpc import Peer
from millrace.worker import make_worker

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise MissingDependency("trainer.runtime=ray needs Ray. Fix: pip install 'millrace[ray]'.") from error

START_DEADLINE_S = 180.0
_PLACEMENT_DEADLINE_S = 60.0


class RayHost:
    """The actor: a Host whose frames Ray carries. `serve` runs as long as the actor lives."""

    def __init__(self, role: str, loopback: bool) -> None:
        os.environ["MILLRACE_HOST"] = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        self._root = make_worker(role)
        self._host: Host | None = None
        self._frames: list[bytes] = []
        self._early: dict[int, bytes] = {}
        self._next = 0
        self._ready = asyncio.Event()
        self._serving = asyncio.Event()

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._host = Host(self._root, self._send, tasks)
            self._serving.set()
            await asyncio.Event().wait()

    def _send(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._ready.set()

    async def up(self) -> None:
        """Answers once `serve` runs."""
        await self._serving.wait()

    async def push(self, number: int, frame: bytes) -> None:
        """Ray may let a small call overtake a large one: frames are taken in their own order."""
        assert self._host is not None
        self._early[number] = frame
        while self._next in self._early:
            self._host.receive(self._early.pop(self._next))
            self._next += 1

    async def pull(self) -> list[bytes]:
        """The frames since the last pull; waits for the first one."""
        await self._ready.wait()
        self._ready.clear()
        frames, self._frames = self._frames, []
        return frames


class RayRuntime:
    """Starts actors in one placement group; ends them all."""

    def __init__(self, config: Config, threads: dict[str, int], *, own: bool, gpus: bool) -> None:
        self._config = config
        self._threads = threads
        self._own = own
        self._gpus = gpus
        self._group: Any = None
        self._actors: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @classmethod
    async def open(cls, config: Config, log_dir: Path, threads: dict[str, int]) -> RayRuntime:
        """Join the cluster at trainer.ray_address, or start one on this machine; then reserve the devices."""
        own = not config.trainer.ray_address and not ray.is_initialized()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "ignore_reinit_error": True}
        if own:
            cores = max(os.cpu_count() or 1, config.trainer_ranks + config.rollout_devices)
            options |= {"num_cpus": cores, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        elif config.trainer.ray_address:
            options |= {"address": config.trainer.ray_address}
        try:
            await asyncio.to_thread(ray.init, **options)
        except ConnectionError as error:
            raise bad_value(
                "trainer.ray_address", config.trainer.ray_address, f"no cluster answers: {error}", "ray start --head"
            ) from error
        gpus = config.trainer.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        runtime = cls(config, threads, own=own, gpus=gpus)
        try:
            await runtime._reserve()
        except BaseException:
            await runtime.close()
            raise
        return runtime

    async def _reserve(self) -> None:
        kind = "GPU" if self._gpus else "CPU"
        bundles = [{kind: float(devices)} | ({"CPU": 1.0} if self._gpus else {}) for devices in node_shares(self._config)]
        _check_possible(self._config, bundles, kind)
        self._group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK")
        ready = await asyncio.to_thread(self._group.wait, _PLACEMENT_DEADLINE_S)
        if not ready:
            free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
            raise bad_value(
                "trainer.runtime",
                "ray",
                f"{bundles} were not free within {_PLACEMENT_DEADLINE_S:g} s; free now: {free}",
                "end other jobs",
            )

    async def start(self, name: str, role: str, index: int) -> Peer:
        share = devices_of_one(self._config, role) * (0.5 if self._config.schedule.colocated else 1.0)
        options: dict[str, Any] = {"num_gpus": share, "num_cpus": 0} if self._gpus else {"num_cpus": share}
        loopback = self._own or all(n["NodeManagerAddress"].startswith("127.") for n in ray.nodes())
        variables = {"OMP_NUM_THREADS": str(self._threads[role]), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
        remote: Any = ray.remote(RayHost)
        actor = remote.options(
            name=f"millrace-{os.getpid()}-{name}",
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle_of(self._config, role, index)
            ),
            runtime_env={"env_vars": variables | ({"GLOO_SOCKET_IFNAME": "lo"} if loopback else {})},
            max_concurrency=1000,
            **options,
        ).remote(role, loopback)
        self._actors.append(actor)
        numbers = itertools.count()
        peer = Peer(
            name, lambda frame: self._push(peer, actor, next(numbers), frame), deadline_s=self._config.trainer.wait_deadline_s
        )
        self._watch(self._serve(peer, actor))
        await asyncio.wait_for(actor.up.remote(), START_DEADLINE_S)
        self._watch(self._pull(peer, actor))
        await peer.call("ping", deadline_s=START_DEADLINE_S)
        return peer

    def _watch(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # ends with its actor; `close` awaits it
        task.add_done_callback(self._tasks.discard)

    def _push(self, peer: Peer, actor: Any, number: int, frame: bytes) -> None:
        if peer.lost is None:
            actor.push.remote(number, frame)

    async def _serve(self, peer: Peer, actor: Any) -> None:
        try:
            await actor.serve.remote()
        except ray.exceptions.RayError as error:
            peer.lose("the run is over" if self._closing else f"worker {peer.name} is lost: {error}")

    async def _pull(self, peer: Peer, actor: Any) -> None:
        try:
            while True:
                for frame in await actor.pull.remote():
                    peer.receive(frame)
        except ray.exceptions.RayError as error:
            peer.lose("the run is over" if self._closing else f"worker {peer.name} is lost: {error}")

    async def close(self) -> None:
        """Kill the actors and free the devices; stop the cluster if this run started it."""
        self._closing = True
        for actor in self._actors:
            ray.kill(actor)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        if self._group is not None:
            remove_placement_group(self._group)
        if self._own:
            await asyncio.to_thread(ray.shutdown)


def node_shares(config: Config) -> list[int]:
    """Devices of each node: both sides' on shared nodes where they fit, else one side's on nodes of its own."""
    t, r = config.trainer, config.rollout
    if config.schedule.colocated:
        return [max(t.n_gpus_per_node, r.n_gpus_per_node)] * nodes_needed(config)
    if not sides_share_nodes(config):
        return [t.n_gpus_per_node] * t.nnodes + [r.n_gpus_per_node] * r.nnodes
    return [t.n_gpus_per_node * (i < t.nnodes) + r.n_gpus_per_node * (i < r.nnodes) for i in range(nodes_needed(config))]


def bundle_of(config: Config, role: str, index: int) -> int:
    """The bundle of a worker."""
    side = config.trainer if role == "trainer" else config.rollout
    first = config.trainer.nnodes if role == "rollout" and not sides_share_nodes(config) else 0
    return first + index * devices_of_one(config, role) // side.n_gpus_per_node


def devices_of_one(config: Config, role: str) -> int:
    """Devices of one worker."""
    return config.rollout.tensor_model_parallel_size if role == "rollout" else 1


def _check_possible(config: Config, bundles: list[dict[str, float]], kind: str) -> None:
    """Refuse what no amount of waiting would place, with the arithmetic."""
    nodes = sorted((n["Resources"].get(kind, 0.0) for n in ray.nodes() if n["Alive"]), reverse=True)
    wanted = sorted((b[kind] for b in bundles), reverse=True)
    if len(nodes) < len(wanted) or any(have < want for have, want in zip(nodes, wanted, strict=False)):
        t, r = config.trainer, config.rollout
        have = ", ".join(f"{math.floor(n)}" for n in nodes) or "none"
        raise bad_value(
            "trainer.nnodes",
            t.nnodes,
            f"trainer {t.nnodes} x {t.n_gpus_per_node} and rollout {r.nnodes} x {r.n_gpus_per_node} devices need {len(wanted)} nodes with "
            f"{', '.join(f'{w:g}' for w in wanted)} {kind}s; the cluster's nodes have {have}",
            "fewer devices, or more nodes",
        )
