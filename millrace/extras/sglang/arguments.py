"""The arguments of SGLang's engine."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

import torch
from sglang.srt.server_args import ServerArgs

from millrace.config import ModelConfig, Sides
from millrace.config.serving_checks import check_known, check_sglang
from millrace.serving.vllm.caches import graph_sizes

_CPU_KV_TOKENS = 65536
_ROOM = 8
"""SGLang reserves six tokens of the context, and the engine's own limits are exact."""


def engine_arguments(sides: Sides, model: ModelConfig, model_folder: str) -> dict[str, Any]:
    """Return arguments of SGLang's ServerArgs.

    Raise ConfigError for settings that the installed SGLang does not support.
    """
    trainer, rollout = sides.trainer, sides.rollout
    check_sglang(version("sglang"))
    on_gpu = torch.cuda.is_available() and trainer.device != "cpu"
    context = rollout.max_len + _ROOM
    sleeps = on_gpu and sides.colocated and rollout.free_cache_engine
    arguments: dict[str, Any] = {
        "model_path": model_folder,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": model.dtype,
        "device": "cuda" if on_gpu else "cpu",
        "random_seed": trainer.seed,
        "trust_remote_code": model.trust_remote_code,
        "tp_size": rollout.tensor_model_parallel_size,
        "context_length": context,
        "max_running_requests": rollout.max_num_seqs,
        "chunked_prefill_size": rollout.max_num_batched_tokens,
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "disable_cuda_graph": rollout.enforce_eager or not on_gpu,
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "enable_memory_saver": sleeps,
        "enable_fp32_lm_head": True,  # logits are float32, as in the train engine
        "sampling_backend": "pytorch",  # the others take no seeds
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "schedule_policy": "lpm",  # a waiting prompt's siblings wait until its K and V are cached
        "sleep_on_idle": True,  # a loop that spins takes the GIL from the thread of a sync
        "enable_return_routed_experts": model.router_replay == "R3",
        "log_level": "warning",
    }
    if on_gpu:  # other kernels permute the weights of experts, which a sync overwrites in order
        arguments["moe_runner_backend"] = "triton"
    if on_gpu and not rollout.enforce_eager:
        # Graphs of whole prompts take a minute to capture, and most steps only draw.
        arguments |= {
            "cuda_graph_bs_decode": graph_sizes(rollout.max_num_seqs),
            "disable_prefill_cuda_graph": True,
        }
    if on_gpu and model.dtype == "float32":
        arguments["attention_backend"] = "triton"  # FlashAttention, its default, refuses float32
    if not on_gpu:
        arguments |= {
            "attention_backend": "torch_native",
            "max_total_tokens": context
            * max(1, min(rollout.max_num_seqs, _CPU_KV_TOKENS // context)),
        }
    # A dataclass in 0.5.17, and a struct of msgspec in 0.5.23.
    check_known("sglang", rollout.engine_kwargs, inspect.signature(ServerArgs).parameters.keys())
    return arguments | rollout.engine_kwargs
