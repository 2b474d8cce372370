"""Ray's actors end with their driver, also where nobody waits for dead processes.

Process 1 of a container is often a `sleep` or a `tail`. Ray's own check takes a zombie for alive.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import HANG_S, until

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's"),
]
_SET_CHILD_SUBREAPER = 36
DRIVER = """
import asyncio, sys
from pathlib import Path
from millrace.runtime.ray import RayRuntime
from tests.runtime.test_placement import config

async def main():
    sides = config((1, 1), (1, 1), runtime="ray", device="cpu").sides
    runtime = await RayRuntime.open(sides, Path(sys.argv[1]))
    await runtime.start("trainer-0", "trainer", 0)
    print(runtime._workers[0].process[0], flush=True)
    await asyncio.sleep(10_000)

asyncio.run(main())
"""


@pytest.fixture
def idle_parent() -> Iterator[None]:
    """Become the parent of all orphans, and wait for none of them."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    for child in psutil.Process().children(recursive=True):
        if child.pid not in before:
            child.kill()
            child.wait(HANG_S)


@pytest.mark.slow
def test_actors_end_with_a_killed_driver(idle_parent: None, tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"RAY_ADDRESS": ""},
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    worker = psutil.Process(int(driver.stdout.readline()))
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    until(lambda: worker.status() == psutil.STATUS_ZOMBIE)  # no actor outlives its driver
