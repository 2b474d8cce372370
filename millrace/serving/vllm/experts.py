"""Mixtures of experts in vLLM on a CPU: arithmetic that keeps no old weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import cpu_fused_moe
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


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
