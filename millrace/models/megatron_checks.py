"""Models that Megatron cannot divide among ranks, or cannot train exactly.

The checks need neither Megatron nor a GPU, so a run makes them before it starts a worker.
"""

from __future__ import annotations

from typing import Any

from millrace.config import MegatronConfig
from millrace.config.megatron_checks import KEY
from millrace.errors import ConfigError, bad_value
from millrace.models.mixtures import experts_of

MODEL_TYPES = ("qwen2", "qwen3", "llama", "qwen3_moe", "mixtral")


def check_model(hf: Any, own: MegatronConfig) -> None:
    """Raise ConfigError if Megatron cannot divide this model, or cannot train it exactly."""
    if hf.model_type not in MODEL_TYPES:
        raise _model_error(f"its type is {hf.model_type}, not one of {', '.join(MODEL_TYPES)}")
    if hf.hidden_act != "silu":
        raise _model_error(f"its activation is {hf.hidden_act}, not silu")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(hf, name, False):
            raise _model_error(f"it has {name}")
    if _window(hf):
        raise _model_error(f"its attention has a sliding window of {hf.sliding_window} tokens")
    tensor = own.tensor_model_parallel_size
    _divides("tensor_model_parallel_size", tensor, hf.num_attention_heads, "the heads")
    heads = hf.num_key_value_heads
    if heads % tensor and tensor % heads:
        raise _size_error(
            "tensor_model_parallel_size", tensor, f"must divide the {heads} heads of keys, or be "
            "a multiple of them"
        )  # fmt: skip
    _divides("tensor_model_parallel_size", tensor, hf.intermediate_size, "the width of the MLP")
    _divides(
        "pipeline_model_parallel_size",
        own.pipeline_model_parallel_size,
        hf.num_hidden_layers,
        "the layers",
    )
    if own.recompute_method == "uniform":
        # Else one stage fails in its first pass, and the others wait for it.
        layers = hf.num_hidden_layers // own.pipeline_model_parallel_size
        _divides("recompute_num_layers", own.recompute_num_layers, layers, "the layers of a stage")
    _divides(
        "context_parallel_size", own.context_parallel_size, hf.num_attention_heads // tensor,
        "the heads of a tensor-parallel rank"
    )  # fmt: skip
    _check_experts(hf, own)


def _check_experts(hf: Any, own: MegatronConfig) -> None:
    experts = experts_of(hf)
    absent = "mlp" if experts else "moe"
    if own.recompute_granularity == "selective" and absent in own.recompute_modules:
        raise bad_value(
            f"{KEY}.recompute_modules",
            list(own.recompute_modules),
            f"no layer of this model has the part {absent}",
            f"{'moe' if experts else 'mlp'} instead of {absent}",
        )
    if not experts:
        if own.expert_model_parallel_size > 1:
            raise _size_error(
                "expert_model_parallel_size",
                own.expert_model_parallel_size,
                "the model has no experts",
            )
        return
    _divides(
        "expert_model_parallel_size",
        own.expert_model_parallel_size,
        experts,
        "the experts of a layer",
    )
    width = getattr(hf, "moe_intermediate_size", hf.intermediate_size)
    _divides("expert_tensor_parallel_size", own.expert_tensor, width, "the width of an expert")
    if own.tensor_model_parallel_size > 1 and not own.sequence_parallel:
        raise bad_value(
            f"{KEY}.sequence_parallel",
            False,
            "a mixture of experts with tensor parallelism needs it",
            f"{KEY}.sequence_parallel=true",
        )
    if getattr(hf, "mlp_only_layers", None) or getattr(hf, "decoder_sparse_step", 1) != 1:
        raise _model_error("only some of its layers have experts")
    if getattr(hf, "router_jitter_noise", 0.0):
        raise _model_error("its router has noise (router_jitter_noise)")


def _window(hf: Any) -> bool:
    if getattr(hf, "sliding_window", None) is None or hf.model_type == "llama":
        return False
    if hf.model_type == "mixtral":
        return True
    return bool(getattr(hf, "use_sliding_window", False))


def _divides(key: str, value: int, whole: int, of: str) -> None:
    if whole % value:
        raise _size_error(key, value, f"must divide {of}, {whole}")


def _size_error(key: str, value: int, rule: str) -> ConfigError:
    return bad_value(f"{KEY}.{key}", value, rule, "another size, or trainer.engine=fsdp")


def _model_error(rule: str) -> ConfigError:
    return bad_value("model.path", "this model", rule, "trainer.engine=fsdp")
