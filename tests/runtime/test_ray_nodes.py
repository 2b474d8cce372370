"""A run on a Ray cluster whose nodes come and go: its replicas follow them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from millrace.config import recipe
from millrace.errors import MillraceError
from millrace.pipeline.history import audit
from millrace.rollout.roster import Standing
from millrace.run import scaling
from millrace.run.session import Session, open_session
from millrace.run.start import start_state
from millrace.run.stop import StopRequest
from millrace.run.train import run_training
from millrace.schedule.ledger import Ledger
from tests.e2e import runs
from tests.runtime.clusters import NODE, open_cluster

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


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not ready():  # noqa: ASYNC110 - the roster has no event
            await asyncio.sleep(0.02)


def groups() -> list[str]:
    """Return the placement groups that reserve devices."""
    return [g["state"] for g in placement_group_table().values() if g["state"] != "REMOVED"]


async def nodes_change(s: Session, ledger: Ledger, cluster: Cluster) -> None:
    """Let a node join and die. Then let one with two devices join."""
    roster, scaler = s.engines.pool.roster, s.engines.scaler
    await until(lambda: ledger.version >= 1)
    begin = time.monotonic()
    with pytest.raises(MillraceError, match=r"devices for 1 replica now.*`ray start` on another"):
        await scaler.scale(2)
    assert time.monotonic() - begin < 5, "an error at once"
    node = cluster.add_node(num_cpus=1, **NODE)
    await until(lambda: roster.live == [0, 1])
    assert groups() == 2 * ["CREATED"]
    await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
    await until(lambda: roster.state(1) is Standing.LEFT)
    assert groups() == ["CREATED"], "nothing waits for another node"
    version = ledger.version
    await until(lambda: ledger.version > version + 1)
    cluster.add_node(num_cpus=2, **NODE)
    await until(lambda: roster.live == [0, 1])
    await scaler.scale(3)
    await until(lambda: roster.live == [0, 1, 2])
    assert groups() == 3 * ["CREATED"]
    await scaler.scale(1)
    assert groups() == ["CREATED"] and roster.live == [0]
    ledger.limit = ledger.retired + ledger.occupied + 8


def test_replicas_follow_the_nodes_of_the_cluster(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replica, two, one, two, three, and one again. No sample is lost on the way."""
    monkeypatch.setattr(scaling, "_LOOK_S", 0.5)
    keys = [
        *("rollout.max_replicas=2", "rollout.total_rollout_steps=100000"),
        *("trainer.runtime=ray", f"trainer.ray_address={cluster.address}", "trainer.device=cpu"),
        *(f"trainer.run_dir={tmp_path}/run", "trainer.threads=1", "rollout.heartbeat_s=0.5"),
        # Without a pause, the run takes both cores, and nodes start slowly.
        f"reward.function={runs.ROOT}/benchmarks/slow_reward.py:compute_score",
    ]
    config, notes = recipe.load(runs.RECIPE, [*runs.SMALL, *keys]), list[str]()

    async def main() -> None:
        progress = runs.progress()
        progress.note = notes.append  # type: ignore[method-assign, assignment]
        async with open_session(config, progress) as s:
            ledger = await start_state(s)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(nodes_change(s, ledger, cluster))
                outcome = await run_training(s, ledger, StopRequest())
            assert outcome.complete and outcome.samples_trained == ledger.limit

    asyncio.run(main())
    found = audit(tmp_path / "run")
    assert (found.lost, found.trained_twice, found.dropped) == (0, 0, {})
    assert not groups()
    told = "\n".join(notes)
    assert "free devices: the run grows from 1 to 2 replicas" in told
    assert "rollout-1 left the run: no node of the cluster has 1 CPU free for rollout-1" in told
    row = runs.rows(tmp_path / "run")[-1]
    assert (row["replicas/live"], row["replicas/lost"]) == (1, 1)
    assert (row["replicas/joined"], row["replicas/left"]) == (3, 3)
