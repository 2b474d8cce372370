"""The arguments of vLLM's engine."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from typing import Any

from transformers import AutoConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from millrace.config import ModelConfig, Sides
from millrace.config.serving_checks import check_known
from millrace.errors import bad_value
from millrace.serving.vllm.caches import graph_options, lasting_folder
from millrace.serving.vllm.eight_bit import CONFIGURATION, check_quantised

EXTENSION = "millrace.serving.vllm.worker.WorkerExtension"
SCHEDULER: str | None = "millrace.serving.vllm.scheduler.scheduler"
_CPU_HEAD = 32
FULL_GRAPH_HEADS = range(65, 129)
"""Head sizes for which FlashAttention 3 keeps the causal mask in a graph captured for one token."""


def engine_arguments(sides: Sides, model: ModelConfig, model_folder: str) -> dict[str, Any]:
    """Return arguments of vLLM's AsyncEngineArgs.

    Raise ConfigError for settings that the installed vLLM does not support.
    """
    trainer, rollout, trust = sides.trainer, sides.rollout, model.trust_remote_code
    on_gpu = current_platform.is_cuda_alike()
    _check_device(trainer.device, on_gpu)
    if not on_gpu:
        _check_heads(model_folder, trust)
    max_len = rollout.max_len
    arguments: dict[str, Any] = {
        "model": lasting_folder(model, model_folder),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the model's own file would change the sampling
        "load_format": "dummy",
        "dtype": model.dtype,
        "seed": trainer.seed,
        "trust_remote_code": trust,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "distributed_executor_backend": "mp" if rollout.tensor_model_parallel_size > 1 else "uni",
        "max_model_len": max_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(
            rollout.max_num_batched_tokens, rollout.max_num_seqs, 0 if on_gpu else max_len
        ),
        # On a CPU, chunked prefill of a seeded request kills vLLM. vLLM rewinds the request's
        # generator, and torch's CPU generators cannot rewind.
        "enable_chunked_prefill": on_gpu,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": rollout.enforce_eager or not on_gpu,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "logprobs_mode": "processed_logprobs",  # raw log-probs ignore the temperature
        "enable_sleep_mode": on_gpu and sides.colocated and rollout.free_cache_engine,
        "weight_transfer_config": {"backend": "millrace"},
        "worker_extension_cls": EXTENSION,
        "scheduler_cls": SCHEDULER,
        "disable_log_stats": True,
        "enable_return_routed_experts": model.router_replay == "R3",
    }
    if on_gpu:
        # Other kernels swap or permute the weights of experts, which a sync overwrites in order.
        arguments["moe_backend"] = "triton"
    check_known("vllm", rollout.engine_kwargs, [f.name for f in fields(AsyncEngineArgs)])
    # Logits are float32, as in the train engine. On a GPU, bf16 logits doubled the gap between the
    # log-probs of both engines, from 0.0015 to 0.0030.
    own = rollout.engine_kwargs.get("hf_overrides", {})
    overrides: Any = {"head_dtype": "float32"} | own if isinstance(own, dict) else own
    if rollout.quantization:
        shape: Any = AutoConfig.from_pretrained(model_folder, trust_remote_code=trust)
        check_quantised(shape, _head_size(shape), rollout.tensor_model_parallel_size)
        overrides["quantization_config"] = deepcopy(CONFIGURATION)  # vLLM changes it
    if on_gpu:
        _check_graphs(rollout.engine_kwargs, model_folder, trust)
    arguments |= rollout.engine_kwargs | {"hf_overrides": overrides}
    if not arguments["enforce_eager"]:
        arguments |= graph_options(rollout.engine_kwargs, rollout.max_num_seqs)
    return arguments


def _check_graphs(engine_kwargs: Mapping[str, Any], model_folder: str, trust: bool) -> None:
    """Raise ConfigError for graphs with which vLLM draws wrong tokens.

    With cudagraph_mode=FULL, one graph serves steps that draw and steps that read prompts. vLLM
    0.26.0 captures it with one token for each request. FlashAttention 3 then selects kernels
    without a causal mask, unless a head has 65 to 128 numbers. So prompts read their own future.
    The figures are in benchmarks/results/vllm.md.
    """
    own = engine_kwargs.get("compilation_config")
    if not isinstance(own, dict) or str(own.get("cudagraph_mode", "")).upper() != "FULL":
        return
    shape: Any = AutoConfig.from_pretrained(model_folder, trust_remote_code=trust)
    if _head_size(shape) not in FULL_GRAPH_HEADS:
        rule = (
            f"with head size {_head_size(shape)}, vLLM's graphs of whole steps read prompts "
            "without a causal mask, and every token is wrong"
        )
        fix = "leave cudagraph_mode out: vLLM's default has whole graphs for steps that only draw"
        raise bad_value("rollout.engine_kwargs.compilation_config", own, rule, fix)


def _head_size(shape: Any) -> int:
    return int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads)


def _check_device(device: str, on_gpu: bool) -> None:
    """Raise ConfigError if the installed vLLM does not run on the chosen device."""
    if device != "auto" and (device == "cuda") != on_gpu:
        rule = f"the installed vLLM is a build for {'GPUs' if on_gpu else 'CPUs'}"
        raise bad_value("trainer.device", device, rule, "trainer.device=auto")


def _check_heads(model_folder: str, trust: bool) -> None:
    """Raise ConfigError for heads that vLLM's CPU attention does not support.

    The check runs before vLLM starts its processes.
    """
    shape: Any = AutoConfig.from_pretrained(model_folder, trust_remote_code=trust)
    if (size := _head_size(shape)) < _CPU_HEAD:
        rule = f"vLLM on a CPU needs a head size of {_CPU_HEAD} or more, and the model has {size}"
        heads = max(1, shape.hidden_size // _CPU_HEAD)
        fix = (
            f"model.shape.num_attention_heads={heads} model.shape.num_key_value_heads=1, "
            "or rollout.engine=torch"
        )
        raise bad_value("rollout.engine", "vllm", rule, fix)
