"""Linear layers of vLLM in 8 bits: their configuration, their checks, and the load of new weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter
from vllm.platforms import current_platform

from millrace.errors import bad_value
from millrace.sync.eight_bit import DTYPE

_KEY = "rollout.quantization"
_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
CONFIGURATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "linear": {
            "targets": ["Linear"],
            "weights": _NUMBERS | {"strategy": "channel", "dynamic": False},
            "input_activations": _NUMBERS | {"strategy": "token", "dynamic": True},
        }
    },
}
"""The description of such a checkpoint, as in its config.json: vLLM then takes its own kernels."""
_CAPABILITY = 89
"""GPUs below have no arithmetic in 8 bits. vLLM permutes their weights for another kernel."""
_MULTIPLE = 16
"""The kernels pad sizes that are no multiple, and a sync cannot write into a padded weight."""


def check_quantised(shape: Any, head_size: int, devices: int) -> None:
    """Raise ConfigError for a model or a GPU without kernels in 8 bits.

    `shape` is the model's configuration, and `devices` those of a replica.
    """
    if current_platform.is_cuda_alike() and not (
        current_platform.is_cuda() and current_platform.has_device_capability(_CAPABILITY)
    ):
        rule = "needs a GPU of NVIDIA with arithmetic in 8 bits: Ada, Hopper or newer"
        raise bad_value(_KEY, "fp8", rule, f"{_KEY}=null")
    text = shape.get_text_config()
    if any(
        getattr(text, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts")
    ):
        rule = "the weights of experts have no sync in 8 bits yet"
        raise bad_value(_KEY, "fp8", rule, f"{_KEY}=null, or a dense model")
    sizes = {
        "hidden size": text.hidden_size,
        "head size": head_size,
        "intermediate size of a device": getattr(text, "intermediate_size", _MULTIPLE) // devices,
    }
    for name, size in sizes.items():
        if size % _MULTIPLE:
            rule = f"the {name} must be a multiple of {_MULTIPLE}, and it is {size}"
            raise bad_value(_KEY, "fp8", rule, f"{_KEY}=null, or another model")


@contextmanager
def as_in_a_checkpoint(model: torch.nn.Module) -> Iterator[None]:
    """Give quantised layers the parameters that vLLM's loaders fill, over the memory they serve.

    After its start, vLLM keeps a weight transposed, and without the loader that knows which rows
    and columns this device has. CUDA graphs read this memory, so no load may replace it.
    """
    served: list[tuple[Any, Tensor, Tensor]] = []
    layer: Any
    for layer in model.modules():
        weight, scale = getattr(layer, "weight", None), getattr(layer, "weight_scale", None)
        if scale is None or weight is None or weight.dtype != DTYPE:
            continue
        served.append((layer, weight, scale))
        load = getattr(layer, "weight_loader_v2", None) or layer.weight_loader
        layer.weight = ModelWeightParameter(
            data=weight.data.T, input_dim=1, output_dim=0, weight_loader=load
        )
        layer.weight_scale = ChannelQuantScaleParameter(
            data=scale.data, output_dim=0, weight_loader=load
        )
        layer.update_param_tp_status()
    try:
        yield
    finally:
        for layer, weight, scale in served:
            layer.weight, layer.weight_scale = weight, scale


def reset_cache_scales(model: torch.nn.Module) -> None:
    """Set the scales of the KV cache to 1. vLLM's start without weights made them random.

    They are parameters of a quantised model, so sleep discards them. The cache has 16 bits, whose
    kernels should not read them.
    """
    for layer in model.modules():
        for name in ("_q_scale", "_k_scale", "_v_scale"):
            if isinstance(scale := getattr(layer, name, None), torch.nn.Parameter):
                scale.data.fill_(1.0)
                setattr(layer, f"{name}_float", 1.0)
