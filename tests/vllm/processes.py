"""vLLM's own processes, for tests."""

from __future__ import annotations

import psutil


def engine_cores() -> list[psutil.Process]:
    """Return vLLM's cores under this process.

    They belong to its workers, or to the nodes of a cluster that it started. A core of an earlier
    test may be dead and not yet reaped. A child of a core has the core's name until it runs a
    program.
    """
    named = [
        p for p in psutil.Process().children(recursive=True) if p.name().startswith("VLLM::Engine")
    ]
    pids = {p.pid for p in named}
    return [p for p in named if p.status() != psutil.STATUS_ZOMBIE and p.ppid() not in pids]
