"""vLLM in Ray actors.

A run learns from them, and no process of vLLM outlives the run on the cluster.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.e2e import runs
from tests.runtime.clusters import open_cluster
from tests.vllm.processes import engine_cores
from tests.vllm.test_e2e import VLLM
from tests.waiting import HANG_S


@pytest.mark.slow
def test_a_run_on_a_cluster_and_nothing_left_of_it(tmp_path: Path) -> None:
    async def main(on_ray: list[str]) -> tuple[list[psutil.Process], set[Path]]:
        async with runs.session(tmp_path, *VLLM, *on_ray, "sft.steps=20") as s:
            cores = engine_cores()
            assert len(cores) == 1
            shared = shared_memory(cores[0])
            assert any(p.name().startswith("VLLM::Worker") for p in cores[0].children()), (
                "on a CPU, vLLM's worker is a child of its core"
            )
            under = cores[0].children(recursive=True)
            outcome = await runs.run(s, tmp_path / "run", *VLLM, *on_ray)
            assert outcome.complete and outcome.samples_trained == 64
            assert all(row["sync/bytes"] > 0 for row in runs.rows(tmp_path / "run"))
        return [*cores, *under], shared

    with open_cluster(num_cpus=2) as cluster:
        address = f"trainer.ray_address={cluster.address}"
        processes, shared = asyncio.run(
            main(["trainer.runtime=ray", address, "mode=async_partial"])
        )
        _, left = psutil.wait_procs(processes, timeout=HANG_S)
        assert not left, "the cluster lives on, and nobody else would end them"
        assert shared
        assert not [path for path in shared if path.exists()], (
            "shared memory stays until the node is started again"
        )


def shared_memory(core: psutil.Process) -> set[Path]:
    """Return the files of shared memory that an engine has mapped, and no other test's."""
    family = [core, *core.parents()[:1], *core.children(recursive=True)]
    maps = {m.path for p in family for m in p.memory_maps()}
    return {Path(path) for path in maps if path.startswith("/dev/shm/psm_")}
