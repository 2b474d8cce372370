"""Settings and fixtures of all tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from millrace.simulate import clock

if TYPE_CHECKING:
    from tests.fork_servers import Pool
    from tests.serving.replica import Replica

# More threads than cores wait for each other, and a test takes twice the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ |= {  # of Ray: no worker that nobody asked for, and none is killed if others fill the memory
    "RAY_prestart_worker_first_driver": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

_LONG = {"e2e", "test_examples.py", "test_ray_nodes.py"}
"""Folders and files whose tests take long without a group."""

# The machines that run these tests are shared, so the duration of an example shows nothing.
settings.register_profile("millrace", deadline=None)
settings.load_profile("millrace")


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """The imports of all tests make no garbage, and looking for it takes a sixth of their time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Nothing that was imported is ever garbage, so no later collection reads it again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the largest groups, whole runs and clusters: what takes long must not begin late."""
    groups = [item.get_closest_marker("xdist_group") for item in items]
    sizes = Counter(group.args[0] for group in groups if group)
    size = {
        item: sizes[group.args[0]] if group else bool(_LONG & {*item.path.parts})
        for item, group in zip(items, groups, strict=True)
    }
    items.sort(key=lambda item: -size[item])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine: in the loop of its runner, on a virtual clock, or anew."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given: dict[str, Any] = pyfuncitem.funcargs
    run = given["runner"].run if "runner" in given else asyncio.run
    if pyfuncitem.get_closest_marker("virtual_clock"):
        run = clock.run
    run(pyfuncitem.obj(**{name: given[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def replica(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """A serving engine that several files share. The last test of serving/test_syncs.py kills it."""
    from tests.serving.replica import Replica

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


@pytest.fixture(scope="session", autouse=True)
def kept_fork_servers() -> Iterator[Pool]:
    """Sessions in this process use the same fork servers, one session after the other."""
    from millrace.runtime import local
    from tests.fork_servers import POOL

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "ForkServer", POOL.get)
        yield POOL
    POOL.close()


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Otherwise, the next engine in this process would use the process group of an earlier test."""
    yield
    if torch := sys.modules.get("torch"):
        assert not torch.distributed.is_initialized(), "an engine of this test was not closed"
