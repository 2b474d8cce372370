"""The checks of trainer.engine=megatron: its keys, this machine, and the sizes of a model.

They need neither Megatron nor a GPU, so a run makes them before it starts a worker.
"""

from __future__ import annotations

import importlib.util
import math
from importlib import metadata
from typing import Any

from millrace.config import (
    ActorConfig,
    AlgorithmConfig,
    MegatronConfig,
    ModelConfig,
    TrainerConfig,
)
from millrace.errors import INSTALL, ConfigError, MissingDependency, bad_value
from millrace.models.mixtures import experts_of
from millrace.run import machine

KEY = "trainer.megatron"
MODEL_TYPES = ("qwen2", "qwen3", "llama", "qwen3_moe", "mixtral")


def check_keys(
    trainer: TrainerConfig, model: ModelConfig, actor: ActorConfig, algorithm: AlgorithmConfig
) -> None:
    """Raise ConfigError if groups of ranks have wrong sizes, or for a key that the engine lacks."""
    _check_sizes(trainer)
    shared = actor.ulysses_sequence_parallel_size
    fsdp = "or trainer.engine=fsdp"
    for key, value, absent, fix in (
        (
            "actor.ulysses_sequence_parallel_size",
            shared,
            shared > 1,
            f"actor.ulysses_sequence_parallel_size=1 {KEY}.context_parallel_size={shared}",
        ),
        ("model.lora_rank", model.lora_rank, bool(model.lora_rank), "model.lora_rank=0"),
        ("model.compile", True, model.compile, "model.compile=false"),
        (
            "actor.optim.optimizer",
            actor.optim.optimizer,
            actor.optim.optimizer != "adamw",
            "actor.optim.optimizer=adamw",
        ),
        (
            "model.gradient_checkpointing_share",
            model.gradient_checkpointing_share,
            model.gradient_checkpointing_share < 1,
            f"{KEY}.recompute_method=block {KEY}.recompute_num_layers=N",
        ),
        (
            "algorithm.adv_estimator",
            algorithm.adv_estimator,
            algorithm.needs_critic,
            "algorithm.adv_estimator=grpo, which has no critic",
        ),
        ("trainer.fsdp_size", trainer.fsdp_size, bool(trainer.fsdp_size), "trainer.fsdp_size=0"),
        (
            "model.router_replay",
            model.router_replay,
            model.router_replay != "disabled" and _recomputes_stages_of_experts(trainer.megatron),
            f"{KEY}.recompute_granularity=full",
        ),
        ("trainer.offload_policy", True, trainer.offload_policy, "trainer.offload_policy=false"),
    ):
        if absent:
            raise bad_value(key, value, "the Megatron engine lacks it so far", f"{fix}, {fsdp}")


def _recomputes_stages_of_experts(own: MegatronConfig) -> bool:
    """Whether experts alone are recomputed, while their stage has begun another micro-batch."""
    selective = own.recompute_granularity == "selective" and "moe" in own.recompute_modules
    return selective and own.pipeline_model_parallel_size > 1


def _check_sizes(trainer: TrainerConfig) -> None:
    """Raise ConfigError if groups of these sizes do not divide the ranks."""
    own, ranks, devices = trainer.megatron, trainer.ranks, trainer.n_gpus_per_node
    dense = {
        "tensor_model_parallel_size": own.tensor_model_parallel_size,
        "pipeline_model_parallel_size": own.pipeline_model_parallel_size,
        "context_parallel_size": own.context_parallel_size,
    }
    experts = {
        "expert_tensor_parallel_size": own.expert_tensor,
        "expert_model_parallel_size": own.expert_model_parallel_size,
        "pipeline_model_parallel_size": own.pipeline_model_parallel_size,
    }
    for sizes in (dense, experts):
        product = 1
        for name, size in sizes.items():
            product *= size
            if ranks % product:
                nodes = f"trainer.nnodes={math.lcm(product, devices) // devices}"
                raise bad_value(
                    f"{KEY}.{name}",
                    size,
                    f"{' x '.join(sizes)} must divide the number of ranks, trainer.nnodes x "
                    f"n_gpus_per_node = {ranks}",
                    f"{nodes if product > 8 else f'trainer.n_gpus_per_node={product}'}, "
                    "or a smaller size",
                )


def check_machine(trainer: TrainerConfig) -> None:
    """Raise ConfigError or MissingDependency if Megatron cannot run here."""
    if trainer.device == "cpu" or not machine.NVIDIA.exists():
        why = "trainer.device is cpu" if trainer.device == "cpu" else "this machine has none"
        rule = f"Megatron trains on NVIDIA GPUs alone, and {why}"
        raise bad_value("trainer.engine", "megatron", rule, "trainer.engine=fsdp")
    # A folder named megatron would be importable too, so this asks for the package.
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        found = ""
    if not found or f"=={found}'" not in INSTALL["megatron-core"]:
        here = f"version {found} is" if found else "it is not"
        raise MissingDependency(
            "trainer.engine=megatron needs the extra millrace[megatron], which is megatron-core: "
            f"{here} installed here. Fix: {INSTALL['megatron-core']}, or trainer.engine=fsdp"
        )
    for package in ("transformer_engine", "apex"):
        if importlib.util.find_spec(package) is not None:
            rule = (
                f"{package} is installed here, and its AdamW has states that millrace cannot save"
            )
            fix = f"pip uninstall {package}, or trainer.engine=fsdp"
            raise bad_value("trainer.engine", "megatron", rule, fix)


def check_model(hf: Any, trainer: TrainerConfig) -> None:
    """Raise ConfigError if Megatron cannot divide this model, or cannot train it exactly."""
    own = trainer.megatron
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
