"""Ray: which worker goes on which node, what cannot be placed is refused with its arithmetic, and a run over two nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from millrace import launch, recipe
from millrace.config import Config
from millrace.errors import ConfigError
from millrace.launch import StopRequest
from millrace.pipeline.history import audit
from millrace.runtime.ray import RayRuntime, bundle_of, node_shares
from tests.e2e import runs


def config(
    trainer: tuple[int, int], rollout: tuple[int, int], *, gpus_in_node: int = 0, mode: str = "separate", **other: Any
) -> Config:
    """A configuration of nodes x devices on each side."""
    return Config(
        trainer={"nnodes": trainer[0], "n_gpus_per_node": trainer[1], "gpus_in_node": gpus_in_node} | other,
        rollout={"nnodes": rollout[0], "n_gpus_per_node": rollout[1]},
        async_training={"placement": mode},
    )


def places(c: Config) -> list[list[str]]:
    """Workers by bundle."""
    found: list[list[str]] = [[] for _ in node_shares(c)]
    for role, count in (("trainer", c.trainer_ranks), ("rollout", c.replicas)):
        for index in range(count):
            found[bundle_of(c, role, index)].append(f"{role}-{index}")
    return found


@pytest.mark.parametrize(
    ("c", "shares", "workers"),
    [
        (config((1, 1), (1, 1)), [2], [["trainer-0", "rollout-0"]]),
        (config((1, 1), (1, 1), gpus_in_node=1), [1, 1], [["trainer-0"], ["rollout-0"]]),
        (config((1, 2), (2, 2), gpus_in_node=4), [4, 2], [["trainer-0", "trainer-1", "rollout-0", "rollout-1"], ["rollout-2", "rollout-3"]]),
        (config((2, 1), (1, 3), gpus_in_node=4), [4, 1], [["trainer-0", "rollout-0", "rollout-1", "rollout-2"], ["trainer-1"]]),
        (config((2, 2), (1, 3), gpus_in_node=4), [2, 2, 3], [["trainer-0", "trainer-1"], ["trainer-2", "trainer-3"], ["rollout-0", "rollout-1", "rollout-2"]]),
        (config((2, 1), (2, 1), gpus_in_node=1, mode="colocated"), [1, 1], [["trainer-0", "rollout-0"], ["trainer-1", "rollout-1"]]),
    ],
)  # fmt: skip
def test_workers_share_nodes_where_both_sides_fit_one_and_have_their_own_elsewhere(
    c: Config, shares: list[int], workers: list[list[str]]
) -> None:
    assert node_shares(c) == shares
    assert places(c) == workers


@pytest.mark.parametrize("trainer", [(1, 1), (1, 4), (2, 2), (3, 1), (1, 8)])
@pytest.mark.parametrize("rollout", [(1, 1), (2, 4), (1, 3), (4, 1), (1, 8)])
@pytest.mark.parametrize("gpus_in_node", [0, 8])
def test_no_bundle_gets_more_workers_than_devices_nor_more_than_a_node_has(
    trainer: tuple[int, int], rollout: tuple[int, int], gpus_in_node: int
) -> None:
    c = config(trainer, rollout, gpus_in_node=gpus_in_node)
    assert [len(workers) for workers in places(c)] == node_shares(c)
    assert len(node_shares(c)) == c.derived().nodes_needed and max(node_shares(c)) <= 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes with one CPU each, as `ray start` twice would make."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    two = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
    )
    two.add_node(num_cpus=1, object_store_memory=80 << 20)
    two.wait_for_nodes()
    yield two.address
    ray.shutdown()
    two.shutdown()


def test_what_no_waiting_would_place_is_refused_with_the_arithmetic(cluster: str, tmp_path: Path) -> None:
    async def opened(c: Config) -> None:
        runtime = await RayRuntime.open(c, tmp_path, {"trainer": 1, "rollout": 1})
        await runtime.close()

    for c, message in [
        (
            config((1, 2), (1, 1), gpus_in_node=2, ray_address=cluster),
            r"trainer 1 x 2 and rollout 1 x 1 devices need 2 nodes with 2, 1 CPUs; the cluster's nodes have 1, 1",
        ),
        (
            config((2, 1), (1, 1), gpus_in_node=1, ray_address=cluster),
            r"trainer 2 x 1 and rollout 1 x 1 devices need 3 nodes with 1, 1, 1 CPUs; the cluster's nodes have 1, 1",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            asyncio.run(opened(c))


def nodes_of_actors() -> dict[str, str]:
    """Node by worker, of the actors that are alive."""
    from ray._private.state import actors

    alive = [a for a in actors().values() if a["State"] == "ALIVE"]
    return {a["Name"].removeprefix(f"millrace-{os.getpid()}-"): a["Address"]["NodeID"] for a in alive}


def test_trainer_and_rollouts_train_on_nodes_of_their_own(cluster: str, tmp_path: Path) -> None:
    """One device in each node: the two sides do not fit one, and the run spans both."""
    placed = [
        "trainer.runtime=ray",
        f"trainer.ray_address={cluster}",
        "trainer.gpus_in_node=1",
        f"trainer.run_dir={tmp_path / 'run'}",
    ]
    c = recipe.load(runs.RECIPE, [*runs.SMALL, *placed])
    nodes: dict[str, str] = {}

    async def main() -> launch.Outcome:
        async with launch.open_session(c, runs.progress()) as s:
            nodes.update(nodes_of_actors())
            return await launch.run_training(s, await launch.start_state(s), StopRequest())

    outcome = asyncio.run(main())
    assert set(nodes) == {"trainer-0", "rollout-0"} and nodes["trainer-0"] != nodes["rollout-0"]
    assert outcome.complete and outcome.samples_trained == 64
    found = audit(tmp_path / "run")
    assert (found.admitted, found.trained, found.lost, found.trained_twice) == (64, 64, 0, 0)
    assert all(row["sync/bytes"] > 0 for row in runs.rows(tmp_path / "run"))
    assert not nodes_of_actors(), "close ends every actor"
