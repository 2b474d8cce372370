"""vLLM's own processes, as the tests see them."""

from __future__ import annotations

import psutil


def engine_cores() -> list[psutil.Process]:
    """vLLM's processes under this one: of its workers, or of the nodes of a cluster that it started."""
    return [p for p in psutil.Process().children(recursive=True) if p.name().startswith("VLLM::Engine")]
