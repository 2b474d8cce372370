"""Ray for real, on clusters of several nodes on this machine.

Workers get the devices of their plan. A placement that does not fit is refused with its arithmetic.
The death of a node is reported, and a run spans two nodes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from millrace.errors import ConfigError, NoDevices, WorkerError
from millrace.runtime import ray_places
from millrace.runtime.ray import RayRuntime
from millrace.runtime.ray_token import NO_TOKEN
from tests.runtime.clusters import NODE, open_cluster
from tests.runtime.test_placement import config
from tests.waiting import HANG_S

pytestmark = pytest.mark.xdist_group("ray cluster")  # one worker starts the cluster once


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start two nodes, as two calls of `ray start` would.

    Each has one CPU. They have 4 and 2 GPUs that exist only for Ray.
    """
    with open_cluster(num_cpus=1, num_gpus=4) as two:
        two.add_node(num_cpus=1, num_gpus=2, **NODE)
        two.wait_for_nodes()
        yield two


@asynccontextmanager
async def opened(
    cluster: Cluster, folder: Path, *sides: tuple[int, int], **other: Any
) -> AsyncIterator[RayRuntime]:
    c = config(*sides, runtime="ray", ray_address=cluster.address, **other)
    notes: list[str] = []
    runtime = await RayRuntime.open(c.sides, folder, notes.append)
    assert notes == [NO_TOKEN], "the cluster of this test has no token"
    try:
        yield runtime
    finally:
        await runtime.close()


def refusal(cluster: Cluster, folder: Path, *sides: tuple[int, int], **other: Any) -> str:
    async def attempt() -> None:
        async with opened(cluster, folder, *sides, **other):
            pass

    with pytest.raises(ConfigError) as caught:
        asyncio.run(attempt())
    return str(caught.value)


def test_what_no_waiting_would_place_is_refused_with_the_arithmetic(
    cluster: Cluster, tmp_path: Path
) -> None:
    said = refusal(cluster, tmp_path, (1, 2), (1, 1), gpus_in_node=2, device="cpu")
    assert (
        "trainer 1 x 2 and rollout 1 x 1 devices need 2 nodes with 2, 1 CPUs; the cluster's nodes have 1, 1"
        in said
    )
    said = refusal(cluster, tmp_path, (1, 4), (1, 4))
    assert (
        "need 1 node with 8 GPUs (to 2 nodes with 4, 4, where the sides share none); the cluster's nodes have 4, 2"
        in said
    )


def test_devices_that_others_hold_are_waited_for_and_then_told(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_places, "PLACEMENT_DEADLINE_S", 1.0)
    ray.init(address=cluster.address, ignore_reinit_error=True, log_to_driver=False)
    others = placement_group([{"GPU": 3.0}])
    assert others.wait(HANG_S)
    said = refusal(cluster, tmp_path, (1, 2), (1, 2))
    assert "in 1 s the cluster's nodes had no more than 2, 1 free. Fix: end other jobs" in said
    remove_placement_group(others)


def test_a_folder_that_a_node_does_not_see_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    said = refusal(cluster, tmp_path / "nowhere" / "logs", (1, 1), (1, 1))
    assert said.startswith(
        f"trainer.run_dir = '{tmp_path}/nowhere': the driver's folder is not on "
    )


async def gpus_of_actors(runtime: RayRuntime, roles: dict[str, int]) -> dict[str, tuple[str, str]]:
    """Return (node, CUDA_VISIBLE_DEVICES) of every worker, as its process sees them."""
    workers = [(role, k) for role, count in roles.items() for k in range(count)]
    await asyncio.gather(*(runtime.start(f"{role}-{k}", role, k) for role, k in workers))
    found: dict[str, tuple[str, str]] = {}
    for worker in runtime._workers:
        name, *place = await worker.actor.__ray_call__.remote(
            lambda host: (
                type(host._root).__name__, ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]
            )
        )  # fmt: skip
        role = {"TrainWorker": "trainer", "RolloutWorker": "rollout"}[name]
        assert worker.peer.name.startswith(role)
        found[worker.peer.name] = (place[0], place[1])
    return {name: found[name] for role in roles for name in sorted(found) if role in name}


async def test_colocated_sides_share_gpus_one_to_one(cluster: Cluster, tmp_path: Path) -> None:
    async with opened(cluster, tmp_path, (1, 2), (1, 2), mode="colocated") as runtime:
        found = await gpus_of_actors(runtime, {"trainer": 2, "rollout": 2})
        assert found["trainer-0"] == found["rollout-0"] and found["trainer-1"] == found["rollout-1"]
        assert [gpus for _, gpus in found.values()] == ["0", "1", "0", "1"]
        answers = await asyncio.to_thread(runtime.answers)
        assert sorted(a.name for a in answers) == sorted(found)
        assert all(a.process is not None and "MainThread" in a.stacks for a in answers)


@pytest.mark.slow
async def test_a_replica_of_two_gpus_has_both_on_one_node_beside_the_trainers(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with opened(cluster, tmp_path, (1, 2), (2, 2), tp=2) as runtime:
        found = await gpus_of_actors(runtime, {"trainer": 2, "rollout": 2})
        assert {w: gpus for w, (_, gpus) in found.items()} == {
            "trainer-0": "0", "trainer-1": "1", "rollout-0": "2,3", "rollout-1": "0,1"
        }  # fmt: skip
        assert (
            found["trainer-0"][0]
            == found["trainer-1"][0]
            == found["rollout-0"][0]
            != found["rollout-1"][0]
        )


async def two_find_places(runtime: RayRuntime) -> None:
    """Wait until Ray knows of the devices that were given back, also by the test before."""
    async with asyncio.timeout(HANG_S):
        while (await runtime.limit()).most != 2:  # noqa: ASYNC110 - Ray has no event
            await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_a_further_replica_gets_two_gpus_that_nobody_has_and_gives_them_back(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start takes the four GPUs of one node. The other node has two."""
    monkeypatch.setattr(ray_places, "_GROW_S", HANG_S)
    async with opened(cluster, tmp_path, (1, 2), (1, 2), tp=2, gpus_in_node=4) as runtime:
        await two_find_places(runtime)
        found = await gpus_of_actors(runtime, {"rollout": 2})
        assert [gpus for _, gpus in found.values()] == ["2,3", "0,1"]
        assert found["rollout-0"][0] != found["rollout-1"][0]
        assert (await runtime.limit()).most == 2
        with pytest.raises(NoDevices, match="no node of the cluster has 2 GPUs free"):
            await asyncio.wait_for(runtime.start("rollout-2", "rollout", 2), HANG_S)
        last = next(w.peer for w in runtime._workers if w.peer.name == "rollout-1")
        await runtime.end(last)
        runtime.release(1)
        await two_find_places(runtime)
        assert [*runtime._places._seats] == [0]


def nodes_of_actors() -> dict[str, str]:
    """Return the node of each worker whose actor is alive."""
    from ray._private.state import actors

    alive = [a for a in actors().values() if a["State"] == "ALIVE"]
    return {
        a["Name"].removeprefix(f"millrace-{os.getpid()}-").rpartition("-")[0]: a["Address"][
            "NodeID"
        ]
        for a in alive
    }


@pytest.mark.slow
async def test_a_node_that_dies_ends_its_workers_calls_with_their_names(
    cluster: Cluster, tmp_path: Path
) -> None:
    """This test comes last, because its node does not come back."""
    async with opened(cluster, tmp_path, (1, 1), (1, 1), gpus_in_node=1, device="cpu") as runtime:
        sides = ("trainer", "rollout")
        peers = dict(
            zip(sides, [await runtime.start(f"{side}-0", side, 0) for side in sides], strict=True)
        )
        nodes = nodes_of_actors()
        doomed = next(node for node in cluster.worker_nodes if node.node_id in nodes.values())
        side = next(side for side in sides if nodes[f"{side}-0"] == doomed.node_id)
        await asyncio.to_thread(cluster.remove_node, doomed, allow_graceful=False)
        with pytest.raises(WorkerError, match=f"worker {side}-0 on [0-9.]+ is dead"):
            await asyncio.wait_for(peers[side].call("listen"), HANG_S)
        await peers[next(other for other in sides if other != side)].call("ping")
