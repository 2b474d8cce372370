"""vLLM's own processes, as the tests see them."""

from __future__ import annotations

import psutil


def engine_cores() -> list[psutil.Process]:
    """vLLM's cores under this process: of its workers, or of the nodes of a cluster that it started.

    A core of a test before this one may be dead and not yet reaped; a child of a core has its name until it runs a program.
    """
    named = [
        p for p in psutil.Process().children(recursive=True) if p.name().startswith("VLLM::Engine")
    ]
    pids = {p.pid for p in named}
    return [p for p in named if p.status() != psutil.STATUS_ZOMBIE and p.ppid() not in pids]
