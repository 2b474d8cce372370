"""vLLM for real: its CPU build, in an environment of its own (`make test-vllm`).

Other environments do not collect these tests.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.vllm.replica import Replica

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("vllm") is None else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run whole runs first, and the tests of the shared engine last.

    Two processes of pytest-xdist then end at about the same time: one has the group `engines`,
    whose tests import vLLM, and the other has test_e2e.py and test_ray.py.
    """
    order = {"test_e2e": 0, "test_ray": 1, "test_signals": 2}

    def key(item: pytest.Item) -> tuple[int, bool]:
        if item.path.parent != Path(__file__).parent:
            return -1, False
        return order.get(item.path.stem, 3), "replica" in getattr(item, "fixturenames", ())

    items.sort(key=key)


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def replica(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """An engine that three files share. The last test of test_syncs.py kills it."""
    from tests.vllm.replica import Replica

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("NCCL_IB_HCA", "mlx5")
        patch.setenv(
            "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "1"
        )  # other tasks run between any two outputs, as with hundreds of requests
        made = Replica(tmp_path_factory.mktemp("model"))
        runner.run(made.start(patch))
        runner.run(made.publish(0, 1))
        yield made
        runner.run(made.engine.close())
