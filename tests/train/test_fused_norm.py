"""Norms by torch's fused kernels: which ones, and that they compute the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from millrace.train.fsdp import sharding
from millrace.train.fused_norm import fuse_norms


@pytest.mark.parametrize("cls", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_plain_norms_compute_the_same_with_the_same_gradients(
    cls: Callable[..., Any], dtype: torch.dtype
) -> None:
    plain = cls(64, eps=1e-5).to(dtype)
    with torch.no_grad():
        plain.weight.copy_(torch.randn(64))
    fused = copy.deepcopy(plain)
    assert fuse_norms(nn.Sequential(fused)) == 1
    x = torch.randn(3, 5, 64, dtype=dtype)
    results = []
    for norm in (plain, fused):
        own = x.clone().requires_grad_()
        y = norm(own)
        y.square().sum().backward()
        assert y.dtype == dtype and own.grad is not None and norm.weight.grad is not None
        results.append((y.detach(), own.grad, norm.weight.grad))
    atol = 0.1 if dtype == torch.bfloat16 else 1e-4
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=0.02 if dtype == torch.bfloat16 else 1e-4, atol=atol)


def test_norms_of_another_formula_stay() -> None:
    others = nn.Sequential(
        GemmaRMSNorm(64), Qwen3NextRMSNormGated(64), nn.LayerNorm(64), nn.RMSNorm(64)
    )
    assert fuse_norms(others) == 0
    assert not any("forward" in vars(m) for m in others)


def test_a_norm_without_memory_is_recognised() -> None:
    with torch.device("meta"):
        module = nn.Sequential(LlamaRMSNorm(64))
    assert fuse_norms(module) == 1


def test_compiled_layers_with_fused_norms_share_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compiles one graph for eight layers at most, and leaves the others as they are."""
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 10}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="eager", use_cache=False)
    )
    tokens = torch.arange(12)[None]
    want = model(tokens).logits
    assert fuse_norms(model) == 21
    for layer in model.model.layers:
        layer.forward = sharding._compiled(layer.forward)
    torch.testing.assert_close(model(tokens).logits, want)
