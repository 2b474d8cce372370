"""The parts of the start of vLLM's worker: their times, and what it does now."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from vllm.compilation import decorators
from vllm.platforms import current_platform

from millrace.waits.registry import began, starting
from millrace.waits.wait_server import start_in_worker

_OF_WORKER = (
    ("load_model", "model"),
    ("determine_available_memory", "memory"),
    ("initialize_from_config", "KV cache"),
    ("compile_or_warm_up_model", "warm-up"),
)
_OF_RUNNER = (("profile_cudagraph_memory", "graph memory"), ("capture_model", "graphs"))


def time_starts() -> None:
    """Time what vLLM's worker does until it serves. Parts may lie inside of others."""
    began("imports")
    name = "cpu_worker.CPUWorker" if current_platform.is_cpu() else "gpu_worker.Worker"
    module, _, cls = name.partition(".")
    worker: Any = getattr(importlib.import_module(f"vllm.v1.worker.{module}"), cls)
    init_device = _timed(worker.init_device, "device")

    def timed_init(self: Any) -> None:
        self.millrace_side = start_in_worker(f"core-{self.rank}")
        init_device(self)
        for method, what in _OF_RUNNER:
            if work := getattr(self.model_runner, method, None):
                setattr(self.model_runner, method, _timed(work, what))

    worker.init_device = timed_init
    module_of_worker = importlib.import_module(worker.__module__)
    if kernels := getattr(module_of_worker, "warmup_kernels", None):
        setattr(module_of_worker, "warmup_kernels", _timed(kernels, "kernels"))  # noqa: B010
    for method, what in _OF_WORKER:
        setattr(worker, method, _timed(getattr(worker, method), what))
    compiling = decorators.monitor_torch_compile

    @contextlib.contextmanager
    def timed_compile(*args: Any, **kwargs: Any) -> Iterator[None]:
        with starting("compile"), compiling(*args, **kwargs):
            yield

    decorators.monitor_torch_compile = timed_compile


def _timed(work: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return `work` as a part of the start."""

    @functools.wraps(work)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with starting(what):
            return work(*args, **kwargs)

    return timed
