"""Mixtures of experts in vLLM: the names of a sync, and CPU arithmetic that keeps no old weights.

transformers has the experts of a layer in two tensors. Model folders, and vLLM's loaders, have
tensors for each expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import cpu_fused_moe
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_FUSED = re.compile(r"(.+)\.mlp\.experts\.(gate_up_proj|down_proj)")
_BLOCK = "w13_weight", "w2_weight"


def folder_names(kind: str, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under the names of a model folder, expert by expert, without copies.

    `kind` is the model_type of config.json.
    """
    mixtral = kind == "mixtral"
    room = "block_sparse_moe" if mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in weights:
        fused = _FUSED.fullmatch(name)
        if fused is None:
            yield name.replace(".mlp.gate.", f".{room}.gate."), tensor
            continue
        parts = [(down, tensor)]
        if fused[2] == "gate_up_proj":
            parts = list(zip((gate, up), tensor.chunk(2, dim=1), strict=True))
        for part, experts in parts:
            for number, expert in enumerate(experts):
                yield f"{fused[1]}.{room}.experts.{number}.{part}.weight", expert


def live_names(sent: Mapping[str, int], live: Mapping[str, int]) -> dict[str, int]:
    """Return the sums of sent tensors. Those of experts get the name of vLLM's live tensor.

    Several devices can then be verified: each has a part of the live tensor.
    """
    blocks = {
        key: name
        for name in live
        if (key := _block(name)) is not None  # its layer, and which of the two tensors it is
    }
    named = {}
    for name, value in sent.items():
        fused = _FUSED.fullmatch(name)
        key = fused and (f"{fused[1]}.", fused[2] == "gate_up_proj")
        named[blocks.get(key, name) if key else name] = value
    return {_gate(name, live): value for name, value in named.items()}


def _block(name: str) -> tuple[str, bool] | None:
    found = re.fullmatch(
        r"(.+\.)(?:mlp|block_sparse_moe)\.experts\.(?:\w+\.)?(w13|w2)_weight", name
    )
    return None if found is None else (found[1], found[2] == "w13")


def _gate(name: str, live: Mapping[str, int]) -> str:
    other = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
    return other if other in live and name not in live else name


class PlainExperts(cpu_fused_moe.CPUFusedMOE):  # type: ignore[misc]
    """The experts of a layer on a CPU, one after the other.

    vLLM's own class packs the weights once, and later updates would have no effect. It also cannot
    return the experts of a token.
    """

    capture: Callable[[Tensor], None] | None = None

    def __init__(self, layer: torch.nn.Module) -> None:
        self.forward_method = self._experts

    def _experts(
        self, layer: Any, x: Tensor, weights: Tensor, chosen: Tensor, activation: Any, *_: Any
    ) -> Tensor:
        """Return the weighted sum of the `chosen` experts [tokens, k] of each token."""
        if self.capture is not None:
            self.capture(chosen)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            token, place = torch.where(chosen == number)
            inner = cpu_fused_moe._CPU_MOE_ACT_FN[activation](
                torch.nn.functional.linear(x[token], layer.w13_weight[number])
            )
            own = torch.nn.functional.linear(inner, layer.w2_weight[number])
            out.index_add_(0, token, (own * weights[token, place, None]).to(out.dtype))
        return out


def _capture_on_cpu(runner: Any, capturer: Any) -> None:
    """Let every layer tell `capturer` the experts of a step."""
    for module in runner.model.modules():
        if isinstance(module, MoERunner):
            own: Any = module._quant_method.cpu_fused_moe
            own.capture = partial(capturer.capture, module.layer_id)


def use_plain_experts() -> None:
    """Replace vLLM's experts on a CPU, in this process."""
    cpu_fused_moe.CPUFusedMOE = PlainExperts
    GPUModelRunner._bind_routed_experts_capturer = _capture_on_cpu
