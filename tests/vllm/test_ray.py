"""vLLM in Ray actors.

A run learns from them, and no process of vLLM outlives the run on the cluster.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from tests.e2e import runs
from tests.vllm.processes import engine_cores
from tests.vllm.test_e2e import VLLM

pytestmark = pytest.mark.timeout(400)


def test_a_run_on_a_cluster_and_nothing_left_of_it(tmp_path: Path) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    shared = set(Path("/dev/shm").glob("psm_*"))
    node = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    on_ray = ["trainer.runtime=ray", f"trainer.ray_address={cluster.address}", "mode=async_partial"]

    async def main() -> list[psutil.Process]:
        async with runs.session(tmp_path, *VLLM, *on_ray, "sft.steps=20") as s:
            cores = engine_cores()
            assert len(cores) == 1
            outcome = await runs.run(s, tmp_path / "run", *VLLM, *on_ray)
            assert outcome.complete and outcome.samples_trained == 64
            assert all(row["sync/bytes"] > 0 for row in runs.rows(tmp_path / "run"))
        return cores

    try:
        _, left = psutil.wait_procs(asyncio.run(main()), timeout=20)
        assert not left, "the cluster lives on, and nobody else would end them"
        assert not set(Path("/dev/shm").glob("psm_*")) - shared, (
            "shared memory stays until the node is started again"
        )
    finally:
        ray.shutdown()
        cluster.shutdown()
