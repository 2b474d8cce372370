"""The process from which vLLM's core is forked. It imports vLLM while the worker does so, too.

vLLM would start the core as a new process after the worker's imports, which the core then repeats.
The fork is safe: this process has no threads, and the imports do not touch a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

PRELOAD = "millrace.vllm.preload"


def import_beside() -> None:
    """Start the process. A second call does nothing."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOAD])
    forkserver.ensure_running()


class _Process(ForkServerProcess):
    """A process that has the variables of its parent, as a new one has, and not those of a fork."""

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


def context() -> ForkServerContext:
    """Return the context in which vLLM starts its core."""
    return _Context()
