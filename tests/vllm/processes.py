"""vLLM's own processes, for tests."""

from __future__ import annotations

import contextlib

import psutil

WORKER_IN_CORE = ("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
"""The variable that lets vLLM's only worker run in its core, as on a GPU.

On a CPU, vLLM gives the worker a process, and both wait for each other in busy loops. test_ray.py,
test_signals.py and the test of a failed start have that process.
"""


def engine_cores() -> list[psutil.Process]:
    """Return vLLM's cores under this process.

    They belong to its workers, or to the nodes of a cluster that it started. A core of an earlier
    test may be dead and not yet reaped. A child of a core has the core's name until it runs a
    program.
    """
    parents = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            named = process.name().startswith("VLLM::Engine")
            if named and process.status() != psutil.STATUS_ZOMBIE:
                parents[process] = process.ppid()
    pids = {process.pid for process in parents}
    return [process for process, parent in parents.items() if parent not in pids]
