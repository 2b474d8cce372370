"""Checks of trainer.engine=megatron: the sizes of its groups, and keys that it lacks."""

from __future__ import annotations

from millrace.config.algorithm_keys import ActorConfig, AlgorithmConfig
from millrace.config.megatron_keys import MegatronConfig
from millrace.config.model_keys import ModelConfig
from millrace.config.trainer_keys import TrainerConfig
from millrace.errors import bad_value

KEY = "trainer.megatron"


def check_megatron(
    trainer: TrainerConfig, model: ModelConfig, actor: ActorConfig, algorithm: AlgorithmConfig
) -> None:
    """Raise ConfigError at the first check that fails."""
    if trainer.engine != "megatron":
        return
    _check_sizes(trainer.megatron, trainer.ranks)
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


def _check_sizes(own: MegatronConfig, ranks: int) -> None:
    """Raise ConfigError if groups of these sizes do not divide the ranks."""
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
                raise bad_value(
                    f"{KEY}.{name}",
                    size,
                    f"{' x '.join(sizes)} must divide the number of ranks, trainer.nnodes x "
                    f"n_gpus_per_node = {ranks}",
                    f"trainer.n_gpus_per_node={product}, or a smaller size",
                )
