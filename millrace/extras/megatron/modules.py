"""The modules of a Megatron policy: norm, attention over packed rows, and the head.

Attention works on the layout of `millrace.train.packing`, as in the FSDP engine: an opening that
several rows share is read once, and positions come from the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from millrace.extras.megatron.routers import Router, Routers, Routing
from millrace.extras.megatron.shape import Shape
from millrace.models.mixtures import experts_of
from millrace.train.layout import Layout
from millrace.train.log_probs import (
    Vocabulary,
    log_probs_and_entropy,
    sum_of_squares,
    vocabulary_of,
)
from millrace.train.packed_attention import packed_attention
from millrace.train.packing import MicroBatch, attention_length

if not hasattr(moe_utils, "te_general_gemm"):
    # The router of 0.16.1 reads this name, which it imports only with TransformerEngine.
    moe_utils.te_general_gemm = None


class Norm(nn.Module):
    """RMSNorm with the casts of transformers. Under sequence parallelism its gradient is summed."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        x = states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(states.dtype)


@dataclass(slots=True)
class Packed:
    """The lengths of a micro-batch, for attention. Megatron hands them to every layer."""

    layout: Layout
    cos: Tensor
    """[tokens, head size] of the rotary embedding, at the position of each of this rank's tokens."""
    sin: Tensor
    routing: Routing | None = None
    qkv_format: str = "thd"
    """Megatron then gives attention [tokens, heads, head size], and takes the same."""


class Attend(nn.Module):
    """Causal attention over packed rows."""

    def __init__(self, config: Any, layer_number: int, *_: Any, **keys: Any) -> None:
        super().__init__()
        self.scale = keys.get("softmax_scale") or config.kv_channels**-0.5
        self.router: Router | None = None
        """The router of this layer."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: None, *, packed_seq_params: Packed, **_: Any
    ) -> Tensor:
        """Return attention [tokens, heads x head size] of q, k and v [tokens, heads, head size].

        The last tokens may be padding, and their results are 0.
        """
        packed = packed_seq_params
        if self.router is not None:
            self.router.routing = packed.routing
        q, k = apply_rotary_pos_emb(q, k, packed.cos, packed.sin)
        rows = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        found, _ = packed_attention(
            self, *rows, None, scaling=self.scale, packed_layout=packed.layout
        )
        return found[0].flatten(1)


def layers_of(config: Any) -> TransformerBlockSubmodules:
    """Return the layers of this stage, with our norm and our attention."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = Attend
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    layers = [spec] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


class Policy(GPTModel):  # type: ignore[misc]
    """One stage of a policy over packed tokens. The last stage returns log-probs and entropies."""

    def __init__(self, config: Any, hf: Any, shape: Shape) -> None:
        tied = bool(hf.tie_word_embeddings)
        super().__init__(
            config=config,
            transformer_layer_spec=layers_of(config),
            vocab_size=shape.padded_vocab(hf.vocab_size),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="none",
        )
        # A tuple hides the table from casts to half precision: it must stay float32.
        self._rotary = (LlamaRotaryEmbedding(hf),)
        self._shape, self._mixture = shape, experts_of(hf) > 0
        self.attention_length = attention_length(hf)
        self.routers = Routers(self.decoder, hf, shape)
        if self.post_process:
            tensor = parallel_state.get_tensor_model_parallel_group()
            rows = shape.padded_vocab(hf.vocab_size) // shape.tensor
            self._vocabulary: Vocabulary = vocabulary_of(tensor, rows, hf.vocab_size)
            # The layer's hooks gather its weight before it computes, so it must be called.
            self.output_layer.forward = MethodType(_score, self)

    def forward(  # type: ignore[override]
        self, batch: MicroBatch, temperature: float, squares: bool = False
    ) -> Tensor | tuple[Tensor, ...]:
        """Return log p(target) and entropy, each [M], at `temperature`; earlier stages: states.

        With `squares` there is also the sum of p^2 over the vocabulary, without a gradient.
        """
        share = batch.layout.share
        ids, positions = share.part(batch.input_ids), share.part(batch.position_ids)
        states = None
        if self.pre_process:
            states = self.embedding(input_ids=ids.unsqueeze(0), position_ids=None)
        like = torch.empty(0, dtype=self.config.params_dtype, device=ids.device)
        rotary = self._rotary[0].to(ids.device)
        cos, sin = rotary(like, positions.unsqueeze(0))
        padding = share.padded(ids.device).unsqueeze(0) if share.padding else None
        routing = self.routers.begin(batch)
        states = self.decoder(
            hidden_states=states,
            attention_mask=None,
            packed_seq_params=Packed(batch.layout, cos[0], sin[0], routing),
            padding_mask=padding if self._mixture else None,
        )
        self.routers.end(batch, routing)
        if not self.post_process:
            return cast(Tensor, states)
        weight = self.shared_embedding_or_output_weight() if self._tied else None
        outputs: tuple[Tensor, ...] = self.output_layer(
            states, batch, temperature, squares, weight=weight
        )
        return outputs

    @property
    def _tied(self) -> bool:
        return bool(self.share_embeddings_and_output_weights)


def _score(
    self: Policy,
    states: Tensor,
    batch: MicroBatch,
    temperature: float,
    squares: bool,
    *,
    weight: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the outputs of the head, for the trained tokens of the micro-batch."""
    if self.config.sequence_parallel:
        states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=True)
    else:
        states = copy_to_tensor_model_parallel_region(states)
    states = states.squeeze(1)
    share = batch.layout.share
    select, mine = share.selected(batch.select)
    targets = batch.targets if mine is None else batch.targets[mine]
    head = (states.index_select(0, select), self.output_layer.weight if weight is None else weight)
    outputs: tuple[Tensor, ...] = log_probs_and_entropy(
        *head, targets, temperature, self._vocabulary
    )
    if squares:
        outputs = (*outputs, sum_of_squares(*head, temperature, self._vocabulary))
    return share.joined(outputs, mine, len(batch.select))
