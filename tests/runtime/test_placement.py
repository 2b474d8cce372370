"""Placement plans.

Every worker has its own devices on a node that has enough of them. A placement that fits no node is
refused with the arithmetic.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from millrace.config import Config
from millrace.errors import ConfigError
from millrace.runtime.placement import Plan, choose, plans, threads


def config(
    trainer: tuple[int, int],
    rollout: tuple[int, int],
    *,
    gpus_in_node: int = 0,
    mode: str = "separate",
    tp: int = 1,
    **other: Any,
) -> Config:
    """Return a configuration of nodes x devices on each side."""
    return Config(
        trainer={"nnodes": trainer[0], "n_gpus_per_node": trainer[1], "gpus_in_node": gpus_in_node}
        | other,
        rollout={
            "nnodes": rollout[0],
            "n_gpus_per_node": rollout[1],
            "tensor_model_parallel_size": tp,
            "engine": "vllm" if tp > 1 else "torch",
        },
        async_training={"placement": mode},
    )


def places(plan: Plan) -> list[dict[str, list[int]]]:
    """Return the devices of each worker, for each node."""
    found: list[dict[str, list[int]]] = [{} for _ in plan.shares]
    for role, count in (
        ("trainer", plan.sides.trainer.ranks),
        ("rollout", plan.sides.rollout.replicas),
    ):
        for index in range(count):
            node, devices = plan.place(role, index)
            found[node][f"{role}-{index}"] = list(range(100))[devices]
    return found


T0, T1, R0, R1 = "trainer-0", "trainer-1", "rollout-0", "rollout-1"


@pytest.mark.parametrize(
    ("c", "workers"),
    [
        (config((1, 1), (1, 1)), [{T0: [0], R0: [1]}]),
        (config((1, 1), (1, 1), gpus_in_node=1), [{T0: [0]}, {R0: [0]}]),
        (config((1, 2), (2, 1), gpus_in_node=4), [{T0: [0], T1: [1], R0: [2]}, {R1: [0]}]),
        (config((2, 1), (1, 2), gpus_in_node=4), [{T0: [0], R0: [1], R1: [2]}, {T1: [0]}]),
        (
            config((2, 1), (1, 4), gpus_in_node=4, tp=2),
            [{T0: [0]}, {T1: [0]}, {R0: [0, 1], R1: [2, 3]}],
        ),
        (
            config((1, 2), (1, 4), gpus_in_node=8, tp=2),
            [{T0: [0], T1: [1], R0: [2, 3], R1: [4, 5]}],
        ),
        (config((1, 2), (1, 2), mode="colocated"), [{T0: [0], R0: [0], T1: [1], R1: [1]}]),
        (
            config((2, 1), (2, 1), gpus_in_node=1, mode="colocated"),
            [{T0: [0], R0: [0]}, {T1: [0], R1: [0]}],
        ),
        (config((1, 2), (1, 2), mode="colocated", tp=2), [{T0: [0], R0: [0, 1], T1: [1]}]),
    ],
)
def test_workers_share_nodes_where_both_sides_fit_one_and_have_their_own_elsewhere(
    c: Config, workers: list[dict[str, list[int]]]
) -> None:
    assert places(plans(c.sides)[0]) == workers
    assert len(workers) == c.derived().nodes_needed


SIDES = [(1, 1), (1, 4), (2, 2), (3, 1), (2, 4), (1, 8)]


@pytest.mark.parametrize("trainer", SIDES)
@pytest.mark.parametrize("rollout", SIDES)
@pytest.mark.parametrize("gpus_in_node", [0, 8])
def test_in_every_plan_each_device_of_each_share_has_one_owner(
    trainer: tuple[int, int], rollout: tuple[int, int], gpus_in_node: int
) -> None:
    c = config(trainer, rollout, gpus_in_node=gpus_in_node)
    for plan in plans(c.sides):
        owned = [sorted(itertools.chain(*node.values())) for node in places(plan)]
        assert owned == [list(range(share)) for share in plan.shares]
    if gpus_in_node:
        assert [len(plan.shares) for plan in plans(c.sides)] == [c.derived().nodes_needed]


@pytest.mark.parametrize(
    ("trainer", "rollout", "sizes", "shares"),
    [
        ((1, 4), (1, 4), [8, 4, 4], [8]),  # the fewest nodes
        ((1, 4), (1, 4), [4, 4], [4, 4]),
        ((2, 4), (1, 4), [4, 8, 4], [8, 4]),
        ((2, 4), (2, 4), [4, 8, 4], [8, 4, 4]),  # one node shared; all or none would not fit
        ((1, 8), (2, 4), [4, 4, 8], [8, 4, 4]),
        ((1, 2), (1, 6), [8, 4, 4], [8]),
        ((3, 2), (1, 2), [2, 2, 4], [4, 2, 2]),
    ],
)
def test_a_plan_for_the_sizes_that_the_nodes_have(
    trainer: tuple[int, int], rollout: tuple[int, int], sizes: list[float], shares: list[int]
) -> None:
    for order in itertools.permutations(sizes):
        assert choose(config(trainer, rollout).sides, "GPU", order, order).shares == shares


def test_of_the_plans_that_nodes_have_room_for_one_that_is_free_now_is_taken() -> None:
    c = config((1, 4), (1, 4))
    assert choose(c.sides, "GPU", [8, 8], [8, 8]).shares == [8]
    assert choose(c.sides, "GPU", [8, 8], [4, 6]).shares == [4, 4]
    assert choose(c.sides, "GPU", [8, 8], [4, 3]).shares == [8], (
        "none is free now: wait for the one with fewest nodes"
    )


@pytest.mark.parametrize(
    ("c", "sizes", "message"),
    [
        (
            config((1, 4), (1, 5)),
            [4, 4, 4],
            "trainer.nnodes = 1: trainer 1 x 4 and rollout 1 x 5 devices need 1 node with 9 GPUs (to 2 nodes with 5, 4, where "
            "the sides share none); the cluster's nodes have 4, 4, 4. Fix: fewer devices, or more nodes.",
        ),
        (
            config((2, 8), (2, 8), mode="colocated"),
            [8, 4],
            "need 2 nodes with 8, 8 GPUs; the cluster's nodes have 8, 4",
        ),
        (
            config((2, 4), (2, 4), gpus_in_node=8),
            [8, 4, 4],
            "need 2 nodes with 8, 8 GPUs; the cluster's nodes have 8, 4, 4",
        ),
        (config((1, 1), (1, 1)), [], "the cluster's nodes have none"),
    ],
)
def test_what_no_wait_would_place_is_refused(c: Config, sizes: list[float], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(c.sides, "GPU", sizes, sizes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("other", "cores", "devices", "expected"),
    [
        ({}, 32, 16, 2),
        ({}, 32, 4, 8),
        ({}, 2, 8, 1),
        ({"threads": 3}, 32, 16, 3),
        ({"deterministic": True}, 32, 4, 1),
    ],
)
def test_a_node_shares_its_cores_among_its_devices(
    other: dict[str, Any], cores: int, devices: int, expected: int
) -> None:
    assert (
        threads(config((1, 1), (1, 1), mode="colocated", **other).trainer, cores, devices)
        == expected
    )
