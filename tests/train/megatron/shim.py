"""Megatron-core on a CPU, for tests alone: it changes devices, streams and random states.

It changes no arithmetic. It cannot show races of streams, overlap, NCCL's order or fused kernels.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch._dynamo
from torch.overrides import TorchFunctionMode

VERSION = "0.16.1"


class OnCpu(TorchFunctionMode):
    """Creates on the CPU what Megatron asks of "cuda". A mode is local to its thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The distributed optimizer compares it with "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.")
        if "cuda" in str(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


class Stream:
    """A stream or an event of a device without them. An annotation in transformers needs a class."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def record_event(self, *_: Any) -> Stream:
        return self

    wait_stream = wait_event = synchronize = record_event


def _nothing() -> Any:
    """Return a function that does nothing. torch.compile allows no object under two names."""
    return lambda *_, **__: None


def _to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


RANDOM = "megatron.core.tensor_parallel.random"
PATCHES: dict[str, dict[str, Any]] = {
    "torch.cuda": {
        "current_device": lambda: "cpu",
        "synchronize": _nothing(),
        "manual_seed": _nothing(),
        "Stream": Stream,
        "current_stream": lambda *_: Stream(),
        "stream": lambda stream: Stream(),
    },
    RANDOM: {
        "_get_cuda_rng_state": lambda *_, **__: torch.get_rng_state(),
        "_set_cuda_rng_state": _nothing(),
    },
    "megatron.core.transformer.moe.token_dispatcher": {"maybe_move_tensor_to_cpu": _to_numpy},
}
"""The patched names of each module, and what replaces them."""

_installed: list[OnCpu] = []


def install() -> None:
    """Patch this process, and enter the mode in this thread. A second call changes nothing."""
    if _installed:
        return
    # Megatron compiles functions when they first run. A CPU needs minutes for it.
    torch._dynamo.config.disable = True
    modules = {name: importlib.import_module(name) for name in reversed(PATCHES)}
    for module, names in PATCHES.items():
        for name, value in names.items():
            setattr(modules[module], name, value)
    mode = OnCpu()
    mode.__enter__()
    _installed.append(mode)
