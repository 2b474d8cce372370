"""A run on a Ray cluster whose nodes come and go: its replicas follow them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from millrace.config import recipe
from millrace.errors import DeadlineError, MillraceError
from millrace.persist.history import audit
from millrace.replicas import scaling
from millrace.replicas.roster import ReplicaState
from millrace.run.session import Session, open_session
from millrace.run.signals import StopRequest
from millrace.run.start import start_state
from millrace.run.train import run_training
from millrace.runtime import ray_places
from millrace.schedule.ledger import Ledger
from tests.e2e import runs
from tests.runtime.clusters import NODE, open_cluster
from tests.waiting import until_async

FAST = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 3,
}
"""Ray sees the death of a node after 1 s, and not after 15 s. A slow node does not count as dead."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Start one node of two CPUs."""
    with open_cluster(num_cpus=2, _system_config=FAST) as one:
        yield one


async def until(ready: Callable[[], bool], notes: list[str]) -> None:
    """Wait until `ready()`. A failure has what the run said until then."""
    await until_async(ready, notes)


def first_in_vain(look: Callable[..., Any]) -> Callable[..., Any]:
    """Let the first look at a node that joined take too long."""
    looks = itertools.count()

    async def looked(folder: Path, where: Any, *args: Any) -> Any:
        if isinstance(where, NodeAffinitySchedulingStrategy) and not next(looks):
            raise DeadlineError("the node is slow")
        return await look(folder, where, *args)

    return looked


def groups() -> list[str]:
    """Return the placement groups that reserve devices."""
    return [g["state"] for g in placement_group_table().values() if g["state"] != "REMOVED"]


async def nodes_change(s: Session, ledger: Ledger, cluster: Cluster, notes: list[str]) -> None:
    """Let a node join and die. Then let one with two devices join."""
    roster, scaler = s.engines.pool.roster, s.engines.scaler
    await until(lambda: ledger.version >= 1, notes)
    with pytest.raises(MillraceError, match=r"devices for 1 replica now.*`ray start` on another"):
        await scaler.scale(2)
    node = cluster.add_node(num_cpus=1, **NODE)
    await until(lambda: roster.live == [0, 1], notes)
    assert groups() == 2 * ["CREATED"]
    await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
    await until(lambda: roster.state(1) is ReplicaState.LEFT, notes)
    assert groups() == ["CREATED"], "nothing waits for another node"
    version = ledger.version
    await until(lambda: ledger.version > version + 1, notes)
    cluster.add_node(num_cpus=2, **NODE)
    await until(lambda: roster.live == [0, 1], notes)
    await scaler.scale(3)
    await until(lambda: roster.live == [0, 1, 2], notes)
    assert groups() == 3 * ["CREATED"]
    await scaler.scale(1)
    assert groups() == ["CREATED"] and roster.live == [0]
    ledger.limit = ledger.retired + ledger.occupied + 8


@pytest.mark.slow
async def test_replicas_follow_the_nodes_of_the_cluster(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replica, two, one, two, three, and one again. No sample is lost on the way."""
    monkeypatch.setattr(scaling, "_LOOK_S", 0.5)
    monkeypatch.setattr(ray_places, "_looked", first_in_vain(ray_places._looked))
    keys = [
        *("rollout.max_replicas=2", "rollout.total_rollout_steps=100000"),
        *("trainer.runtime=ray", f"trainer.ray_address={cluster.address}", "trainer.device=cpu"),
        *(f"trainer.run_dir={tmp_path}/run", "trainer.threads=1"),
        # Without a pause, the run takes both cores, and nodes start slowly.
        f"reward.function={runs.ROOT}/benchmarks/slow_reward.py:compute_score",
    ]
    config, notes = recipe.load(runs.RECIPE, [*runs.SMALL, *keys]), list[str]()
    progress = runs.progress()
    progress.note = notes.append  # type: ignore[method-assign, assignment]
    async with open_session(config, progress) as s:
        ledger = await start_state(s)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(nodes_change(s, ledger, cluster, notes))
            outcome = await run_training(s, ledger, StopRequest())
        assert outcome.complete and outcome.samples_trained == ledger.limit
    found = audit(tmp_path / "run")
    assert (found.lost, found.trained_twice, found.dropped) == (0, 0, {})
    assert not groups()
    told = "\n".join(notes)
    assert "that joined is not used yet: the node is slow" in told
    assert "free devices: the run grows from 1 to 2 replicas" in told
    assert "rollout-1 left the run: no node of the cluster has 1 CPU free for rollout-1" in told
    row = runs.rows(tmp_path / "run")[-1]
    assert (row["replicas/live"], row["replicas/lost"]) == (1, 1)
    assert (row["replicas/joined"], row["replicas/left"]) == (3, 3)
