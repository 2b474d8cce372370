"""The devices of a run in a Ray cluster: those reserved at its start, and those taken later.

One placement group reserves the devices of the start. A bundle is one node's share of both sides,
and STRICT_SPREAD places each bundle on its own node. A replica that finds no place there gets a
small group of its own, which ends with it. If a node dies, Ray moves its bundle to another node as
soon as one has room.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray

# Ray has no public function for this without the dashboard.
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from millrace.config import Sides
from millrace.errors import DeadlineError, NoDevices, WorkerError, bad_value
from millrace.process.rpc import Limit
from millrace.runtime.placement import choose, refusal
from millrace.runtime.ray_token import asks_for_token

START_DEADLINE_S = 180.0
PLACEMENT_DEADLINE_S = 60.0
_GROW_S = 30.0
"""How long Ray may take to reserve devices that are free, also on a busy machine."""
_LOOK_S = 30.0
"""How long a process may take to look at a node that joined."""
_POLL_S = 1.0


class Share(NamedTuple):
    """The devices, packages and folder that a process on a node sees."""

    node: str
    address: str
    gpus: list[str]  # in the form of CUDA_VISIBLE_DEVICES
    has_folder: bool
    cores: int
    asks_for_token: bool


@dataclass(slots=True, eq=False)
class Bundle:
    """Devices of one node that the run has reserved."""

    group: PlacementGroup
    index: int
    devices: int
    """The devices among which the node's cores are shared."""
    share: Share

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.index)

    def node(self) -> str:
        """Return the node that has the devices now. The answer is empty if there is none."""
        found: dict[int, str] = placement_group_table(self.group)["bundles_to_node_id"]
        return found.get(self.index, "")


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """The devices of one worker, among those of its bundle."""

    bundle: Bundle
    devices: slice

    @property
    def gpus(self) -> list[str]:
        return self.bundle.share.gpus[self.devices]

    @property
    def count(self) -> int:
        return int(self.devices.stop - self.devices.start)


class Places:
    """The places of a run's workers."""

    def __init__(self, sides: Sides, folder: Path, note: Callable[[str], None]) -> None:
        """Every node must see `folder`, the run's. `note` hears of one that does not."""
        self._sides, self._folder, self._note = sides, folder, note
        self._each = sides.rollout.tensor_model_parallel_size
        self._kind = "CPU"
        self._bundles: list[Bundle] = []
        self._group: PlacementGroup | None = None
        self._reserved: list[Seat] = []
        """The places of replicas in the group of the start."""
        self._seats: dict[int, Seat] = {}
        """The place of each replica that has one."""
        self._sees: dict[str, bool] = {}
        """Whether each node that answered sees the run's folder."""
        self._slow: set[str] = set()
        """The nodes that did not answer in time, at least once. Nobody waits for their answers."""
        self._looks: dict[str, asyncio.Task[None]] = {}
        """The looks under way, by node."""
        self._turn = asyncio.Lock()

    async def reserve(self) -> None:
        """Reserve the devices of the start. Raises ConfigError if the cluster lacks them."""
        nodes, device = await alive(), self._sides.trainer.device
        if device != "cpu" and any(node["Resources"].get("GPU") for node in nodes.values()):
            self._kind = "GPU"
        elif device == "cuda":
            raise bad_value(
                "trainer.device", device, "no node of the cluster has a GPU", "trainer.device=auto"
            )
        sizes = [node["Resources"].get(self._kind, 0.0) for node in nodes.values()]
        self._plan = choose(self._sides, self._kind, sizes, [*(await self._free()).values()])
        bundles = [{self._kind: float(share)} for share in self._plan.shares]
        self._group = placement_group(
            bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK"
        )
        if not await asyncio.to_thread(self._group.wait, PLACEMENT_DEADLINE_S):
            most = sorted((await self._free()).values(), reverse=True)
            available = (
                f"in {PLACEMENT_DEADLINE_S:g} s the cluster's nodes had no more than "
                f"{', '.join(f'{math.floor(n)}' for n in most)} free"
            )
            fix = "end other jobs (`ray status` shows the devices in use), or fewer devices"
            raise refusal(self._sides, self._kind, available, fix)
        await self._inspect_all(self._group)

    async def _inspect_all(self, group: PlacementGroup) -> None:
        shares = await asyncio.gather(
            *(self._inspect(group, k, devices) for k, devices in enumerate(self._plan.shares))
        )
        self._bundles = [
            Bundle(group, k, self._plan.shares[k], share) for k, share in enumerate(shares)
        ]
        if lacking := sorted({share.address for share in shares if not share.has_folder}):
            rule = (
                f"the driver's folder is not on {', '.join(lacking)}, and every node reads the "
                "model and writes checkpoints there"
            )
            fix = "a folder on a file system that all nodes share"
            raise bad_value("trainer.run_dir", str(self._folder.parent), rule, fix)
        self._sees |= dict.fromkeys((share.node for share in shares), True)
        for index in range(self._sides.rollout.replicas):
            k, devices = self._plan.place("rollout", index)
            self._reserved.append(Seat(self._bundles[k], devices))

    @property
    def loopback(self) -> bool:
        """Whether all nodes of the start are on this machine alone."""
        return all(bundle.share.address.startswith("127.") for bundle in self._bundles)

    @property
    def all_ask_for_a_token(self) -> bool:
        return all(bundle.share.asks_for_token for bundle in self._bundles)

    async def seat(self, role: str, index: int) -> Seat:
        """Return the place of a worker that starts. Raises NoDevices if a replica finds none."""
        if role == "rollout" and not self._sides.colocated:
            async with self._turn:
                return await self._seat_of_replica(index)
        k, devices = self._plan.place(role, index)
        end = asyncio.get_running_loop().time() + START_DEADLINE_S
        while not await self._renewed(self._bundles[k], await alive()):
            if asyncio.get_running_loop().time() > end:
                needs = f"no other node has {self._bundles[k].devices} free {self._kind}s"
                raise WorkerError(f"{role}-{index} has no place: its node is gone, and {needs}")
            await asyncio.sleep(_POLL_S)
        return Seat(self._bundles[k], devices)

    async def _seat_of_replica(self, index: int) -> Seat:
        """Return the replica's place, a free one of the start, or a new one, in this order."""
        nodes = await alive()
        mine = self._seats.get(index)
        if mine is not None:
            if await self._renewed(mine.bundle, nodes):
                return mine
            self.release(index)
        first = self._reserved[index : index + 1]
        for seat in [*first, *self._reserved]:
            if seat not in self._seats.values() and await self._renewed(seat.bundle, nodes):
                self._seats[index] = seat
                return seat
        for node in await self._rooms(nodes):
            if (bundle := await self._grow(node)) is not None:
                self._seats[index] = Seat(bundle, slice(0, self._each))
                return self._seats[index]
        devices = f"{self._each} {self._kind}{'s' * (self._each > 1)}"
        raise NoDevices(f"no node of the cluster has {devices} free for rollout-{index}")

    async def _renewed(self, bundle: Bundle, nodes: dict[str, Any]) -> bool:
        """Return whether a bundle is on a node that lives. Look again if it is another node."""
        node = await asyncio.to_thread(bundle.node)
        if node not in nodes:
            return False
        if node != bundle.share.node:
            bundle.share = await self._inspect(bundle.group, bundle.index, bundle.devices)
        return bundle.share.has_folder

    async def _grow(self, node: str) -> Bundle | None:
        """Reserve the devices of one replica on a node. Return None if they are taken meanwhile."""
        here = [{"ray.io/node-id": node}]
        bundles = [{self._kind: float(self._each)}]
        group = placement_group(bundles, bundle_label_selector=here)
        try:
            if await asyncio.to_thread(group.wait, _GROW_S):
                share = await self._inspect(group, 0, self._each)
                return Bundle(group, 0, await self._size(node), share)
        except BaseException:
            remove_placement_group(group)
            raise
        remove_placement_group(group)
        return None

    async def _size(self, node: str) -> int:
        found = (await alive()).get(node, {"Resources": {}})
        return max(self._each, int(found["Resources"].get(self._kind, 0)))

    def release(self, replica: int) -> None:
        """Give back what a replica has taken. A place of the start stays reserved for the run."""
        seat = self._seats.pop(replica, None)
        if seat is not None and seat.bundle.group is not self._group:
            remove_placement_group(seat.bundle.group)

    async def limit(self) -> Limit:
        """Return how many replicas find a place now, with those that have one."""
        nodes = await alive()
        seats = {*self._reserved, *self._seats.values()}
        bundles = {seat.bundle for seat in seats}
        here = {b for b in bundles if await asyncio.to_thread(b.node) in nodes}
        placed = sum(seat.bundle in here for seat in seats)
        rooms = await self._rooms(nodes)
        most, of = placed + sum(rooms.values()), f"{self._each} {self._kind}"
        count = f"{most} replica{'s' * (most != 1)}"
        why = f"the cluster has devices for {count} now, each of {of}"
        return Limit(most, why, "`ray start` on another node, or ")

    async def _rooms(self, nodes: dict[str, Any]) -> dict[str, int]:
        """Return how many replicas fit into the free devices of each node, the most free first.

        None does while the trainer has no place: what a node has that joins is then the trainer's.
        """
        trainers = {self._plan.place("trainer", r)[0] for r in range(self._sides.trainer.ranks)}
        for k in trainers:
            if await asyncio.to_thread(self._bundles[k].node) not in nodes:
                return {}
        free = {node: int(n // self._each) for node, n in (await self._free()).items()}
        rooms = {node: n for node, n in free.items() if n and node in nodes}
        for node in rooms.keys() - self._sees.keys() - self._looks.keys():
            look = asyncio.create_task(self._look_at(node, nodes[node]["NodeManagerAddress"]))
            self._looks[node] = look
        if first := [look for node, look in self._looks.items() if node not in self._slow]:
            for look in (await asyncio.wait(first))[0]:
                look.result()
        most = sorted(rooms, key=lambda node: -rooms[node])
        return {node: rooms[node] for node in most if self._sees.get(node)}

    async def _free(self) -> dict[str, float]:
        """Return the free devices of each node."""
        found = await asyncio.to_thread(available_resources_per_node)
        return {node: resources.get(self._kind, 0.0) for node, resources in found.items()}

    async def _look_at(self, node: str, address: str) -> None:
        """Ask a process on a node that joined whether it sees the run's folder."""
        there, error = NodeAffinitySchedulingStrategy(node, soft=False), ""
        try:
            self._sees[node] = (await _looked(self._folder, there, 0, _LOOK_S)).has_folder
            if not self._sees[node]:
                error = f"it does not see the run's folder {self._folder.parent}"
        except DeadlineError as late:  # It is busy, or reads its packages for the first time.
            if node not in self._slow:
                self._note(f"the node {address} that joined is not used yet: {late}")
            self._slow.add(node)
        except WorkerError as failure:
            self._sees[node], error = False, str(failure)
        finally:
            del self._looks[node]
        if error:
            self._note(f"warning: the node {address} that joined is not used: {error}")

    async def _inspect(self, group: PlacementGroup, index: int, devices: int) -> Share:
        """Ask a process in a bundle for the bundle's GPUs, and whether it sees the run's folder."""
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        gpus = devices if self._kind == "GPU" else 0
        return await _looked(self._folder, strategy, gpus, START_DEADLINE_S)

    def close(self) -> None:
        """Free all devices."""
        for look in self._looks.values():
            look.cancel()
        for replica in [*self._seats]:
            self.release(replica)
        if self._group is not None:
            remove_placement_group(self._group)


async def alive() -> dict[str, Any]:
    """Return the nodes that Ray believes alive, by id. It sees a silent node die after seconds."""
    try:
        nodes = await asyncio.to_thread(ray.nodes)
    except ray.exceptions.RayError as error:
        raise WorkerError(f"the cluster does not answer: {error}") from error
    return {node["NodeID"]: node for node in nodes if node["Alive"]}


def _look(folder: str) -> Share:
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    cores, has_folder = os.cpu_count() or 1, os.path.isdir(folder)
    address = ray.util.get_node_ip_address()
    return Share(context.get_node_id(), address, gpus, has_folder, cores, asks_for_token())


async def _looked(folder: Path, strategy: Any, gpus: int, deadline_s: float) -> Share:
    """Return what a process sees where `strategy` places it."""
    options: Any = {"num_cpus": 0, "num_gpus": gpus, "max_retries": 0}
    look: Any = ray.remote(**options, scheduling_strategy=strategy)(_look)
    call = look.remote(str(folder))
    try:
        return Share(*await asyncio.wait_for(call, deadline_s))
    except TimeoutError:
        ray.cancel(call)
        raise DeadlineError(
            f"the cluster's nodes started no process within {deadline_s:g} s"
        ) from None
    except ray.exceptions.RayError as error:
        fix = "the same Python, millrace and packages on every node"
        raise WorkerError(
            f"a node of the cluster cannot run millrace: {error}. Fix: {fix}"
        ) from error
