"""How Megatron divides a model among ranks: sizes and places, groups, and its own configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch._C._distributed_c10d import HashStore

from millrace.config import MegatronConfig, ModelConfig
from millrace.models.mixtures import experts_of
from millrace.models.model import DTYPES


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """The place of one rank: its number in each kind of group."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of all groups. Ranks of one tensor group are consecutive, then context and data."""

    world_size: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False

    @property
    def data(self) -> int:
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """The number of copies of an expert."""
        return self.world_size // (self.expert_tensor * self.expert * self.pipeline)

    @property
    def multiple(self) -> int:
        """The number that must divide the tokens of a micro-batch."""
        return self.context * (self.tensor if self.sequence_parallel else 1)

    def place(self, rank: int) -> RankCoordinates:
        """Return the place of a rank, as Megatron numbers them."""
        tensor, rest = rank % self.tensor, rank // self.tensor
        context, rest = rest % self.context, rest // self.context
        data, pipeline = rest % self.data, rest // self.data
        expert_tensor, rest = rank % self.expert_tensor, rank // self.expert_tensor
        expert, rest = rest % self.expert, rest // self.expert
        expert_data = rest % self.expert_data
        return RankCoordinates(tensor, context, data, pipeline, expert_tensor, expert, expert_data)

    def padded_vocab(self, vocab_size: int) -> int:
        """Return the rows of the vocabulary, padded so that every rank has equally many."""
        return -(-vocab_size // self.tensor) * self.tensor


def shape_of(own: MegatronConfig, world_size: int) -> Shape:
    """Return the sizes of the configuration, whose checks prove that they divide the ranks."""
    return Shape(
        world_size=world_size,
        tensor=own.tensor_model_parallel_size,
        pipeline=own.pipeline_model_parallel_size,
        context=own.context_parallel_size,
        expert=own.expert_model_parallel_size,
        expert_tensor=own.expert_tensor,
        sequence_parallel=own.sequence_parallel,
    )


def transformer_config(
    hf: Any, shape: Shape, model: ModelConfig, own: MegatronConfig, device: torch.device
) -> Any:
    """Return Megatron's configuration of a Hugging Face model."""
    dtype = DTYPES[model.dtype]
    half = dtype is torch.bfloat16
    experts = experts_of(hf)
    mixture: dict[str, Any] = {}
    if experts:
        mixture = {
            "num_moe_experts": experts,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", hf.intermediate_size),
            # Megatron then takes the softmax over all experts, and does not normalise again.
            "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32" if half else None,
        }
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        qk_layernorm=hf.model_type.startswith("qwen3"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=shape.tensor,
        pipeline_model_parallel_size=shape.pipeline,
        context_parallel_size=shape.context,
        expert_model_parallel_size=shape.expert,
        expert_tensor_parallel_size=shape.expert_tensor,
        sequence_parallel=shape.sequence_parallel,
        params_dtype=dtype,
        bf16=half,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        # Without it, Megatron refuses micro-batches of different sizes, of dense models too.
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        use_cpu_initialization=device.type == "cpu",
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **mixture,
        **_recompute(model, own),
    )


def _recompute(model: ModelConfig, own: MegatronConfig) -> dict[str, Any]:
    """Return Megatron's names for what the backward pass recomputes."""
    granularity = own.recompute_granularity or ("full" if model.gradient_checkpointing else None)
    if granularity == "full":
        number = own.recompute_num_layers
        method = {"recompute_method": own.recompute_method, "recompute_num_layers": number}
        return {"recompute_granularity": "full", **method}
    if granularity == "selective":
        modules = list(own.recompute_modules)
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


def init_parallel(shape: Shape, *, seed: int, deadline_s: float) -> tuple[bool, bool]:
    """Make Megatron's process groups, and the default process group of a single rank.

    Return whether this made the former and the latter. Megatron's groups are global, so a second
    engine in a process shares those of the first one, and must have its shape.
    """
    if parallel_state.model_parallel_is_initialized():
        return False, False
    made = not dist.is_initialized()
    if made:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=shape.tensor,
        pipeline_model_parallel_size=shape.pipeline,
        context_parallel_size=shape.context,
        expert_model_parallel_size=shape.expert,
        expert_tensor_parallel_size=shape.expert_tensor,
        distributed_timeout_minutes=max(1, math.ceil(deadline_s / 60)),
        create_gloo_process_groups=False,
    )
    # This tracker of random states does nothing: there is no dropout, and weights are loaded.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)
    return True, made


def destroy_parallel() -> None:
    """Destroy Megatron's process groups."""
    parallel_state.destroy_model_parallel()
