"""The keys of the Megatron train engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from millrace.config.section import OneOrMore, ReadWith, Rule, Section
from millrace.errors import bad_value

Size = Annotated[int, Field(ge=1)]
_MEGATRON = ReadWith({"trainer.engine": ("megatron",)})
_FULL = ReadWith(
    {".recompute_granularity": ("full",)},
    {".recompute_granularity": (None,), "model.gradient_checkpointing": (True,)},
)


class MegatronConfig(Section):
    tensor_model_parallel_size: Annotated[Size, _MEGATRON] = 1
    """Ranks that share every matrix of a layer."""
    pipeline_model_parallel_size: Annotated[Size, _MEGATRON] = 1
    """Stages, each with an equal number of consecutive layers."""
    context_parallel_size: Annotated[Size, _MEGATRON] = 1
    """Ranks that share the tokens of a micro-batch. They exchange heads for tokens in attention."""
    expert_model_parallel_size: Annotated[Size, _MEGATRON] = 1
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: Annotated[int, _MEGATRON] = Field(0, ge=0)
    """Ranks that share every matrix of an expert. 0 means tensor_model_parallel_size."""
    sequence_parallel: Annotated[bool, _MEGATRON] = False
    """Divide the tokens outside of attention and MLP among the ranks of tensor parallelism.

    It needs less memory for activations, and no more time.
    """
    use_distributed_optimizer: Annotated[bool, _MEGATRON] = True
    """Divide the optimizer state among the ranks of data parallelism."""
    overlap_grad_reduce: Annotated[bool, _MEGATRON] = False
    """Sum the gradients of a layer while the backward pass computes those of the next one."""
    overlap_param_gather: Annotated[bool, _MEGATRON] = False
    """Gather the weights of a layer while the forward pass computes the layer before.

    Needs use_distributed_optimizer and overlap_grad_reduce.
    """
    recompute_granularity: Annotated[Literal["full", "selective"] | None, _MEGATRON] = None
    """The activations that the backward pass recomputes: whole layers, or recompute_modules.

    null follows model.gradient_checkpointing, which means full.
    """
    recompute_method: Annotated[Literal["uniform", "block"], _FULL] = "uniform"
    """With full: uniform recomputes every layer, in groups of recompute_num_layers.

    block recomputes the first recompute_num_layers layers of each stage.
    """
    recompute_num_layers: Annotated[Size, _FULL] = 1
    """The layers of one group, or of one stage."""
    recompute_modules: Annotated[
        tuple[Literal["core_attn", "mlp", "moe"], ...],
        OneOrMore,
        ReadWith({".recompute_granularity": ("selective",)}),
    ] = ("core_attn",)
    """With selective: the parts of a layer that are recomputed: attention, or the MLP or experts.

    Megatron recomputes norms only with TransformerEngine.
    """

    @property
    def expert_tensor(self) -> int:
        """The size of expert tensor parallelism, after the default is resolved."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def rules(self, here: str) -> Iterator[Rule]:
        tensor, key = self.tensor_model_parallel_size, f"{here}tensor_model_parallel_size"
        yield (
            self.sequence_parallel and tensor == 1,
            "sequence_parallel",
            "the ranks of tensor parallelism divide the tokens, and there is one",
            f"{key}=2, or {here}sequence_parallel=false",
        )
        gathers = self.use_distributed_optimizer and self.overlap_grad_reduce
        yield (
            self.overlap_param_gather and not gathers,
            "overlap_param_gather",
            "only a distributed optimizer gathers weights, and Megatron overlaps this only "
            "together with the gradients",
            f"{here}use_distributed_optimizer=true {here}overlap_grad_reduce=true",
        )
        if self.expert_model_parallel_size == 1 and self.expert_tensor < tensor:
            # Megatron then takes experts for dense weights, and trains them wrongly.
            rule = f"without expert parallelism it must be {key} = {tensor}"
            fix = f"{here}expert_tensor_parallel_size={tensor}, or "
            fix += f"{here}expert_model_parallel_size={tensor}"
            raise bad_value(f"{here}expert_tensor_parallel_size", self.expert_tensor, rule, fix)
