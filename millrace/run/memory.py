"""An estimate of the memory that each device needs, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.config import Config, ModelShape, RolloutConfig, TrainerConfig

_BYTES = {"float32": 4, "bfloat16": 2}
_STATE = 16
"""Bytes of a trained parameter: float32 weight, gradient and both moments of AdamW."""
_CHUNK = 2**30
"""Bytes of a chunk of logits and its passes, about."""

_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner")
"""Names of the width of an MLP in config.json. GPT-2 without a width has 4 x the hidden size."""


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers of a decoder model that memory depends on."""

    parameters: int
    hidden: int
    intermediate: int
    layers: int
    kv_width: int
    """Width of the keys of one token in one layer: key-value heads x head size."""


def size_of(config: Config) -> Size | None:
    """Return the size of the policy, or None if only its data decides it.

    A model in model.path is built on the meta device, without its weights. A new model needs
    model.shape.vocab_size.
    """
    if not config.model.path:
        return _size_of_shape(config.model.shape)
    from millrace.models.model import empty_model

    model = empty_model(config.model.path, trust_remote_code=config.model.trust_remote_code)
    shape = model.config.get_text_config()
    heads = shape.num_attention_heads
    head = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    widths = (getattr(shape, key, None) for key in _WIDTHS)
    return Size(
        sum(p.numel() for p in model.parameters()),
        shape.hidden_size,
        next((width for width in widths if width), 4 * shape.hidden_size),
        shape.num_hidden_layers,
        head * (getattr(shape, "num_key_value_heads", None) or heads),
    )


def _size_of_shape(s: ModelShape) -> Size | None:
    if not s.vocab_size:
        return None
    kv = s.hidden_size // s.num_attention_heads * s.num_key_value_heads
    attention = 2 * s.hidden_size**2 + 2 * s.hidden_size * kv + s.hidden_size + 2 * kv
    layer = attention + 3 * s.hidden_size * s.intermediate_size + 2 * s.hidden_size
    embeddings = s.vocab_size * s.hidden_size * (1 if s.tie_word_embeddings else 2)
    total = embeddings + s.num_hidden_layers * layer + s.hidden_size
    return Size(total, s.hidden_size, s.intermediate_size, s.num_hidden_layers, kv)


def estimate(config: Config, size: Size) -> dict[str, dict[str, int]]:
    """Return the bytes on one device of each side, by their use.

    trainer   state: weights, gradients and moments of the policy and of the critic, and the
              weights of the reference, divided by the ranks of a copy. activations: those of one
              full micro-batch of actor.ppo_max_token_len_per_gpu tokens T. A layer without
              recomputation keeps T (6 H + 3 I) values, and one with recomputation keeps T H.
    rollout   weights, the staged weights of the next version, and the KV cache of
              rollout.max_num_seqs + session_kv_slots full sequences, divided by tensor_model_parallel_size.

    The estimate of activations assumes model.compile=true. On H200s, the trainer's total was at
    most 5 % off the peak of 1.5B and 7B models (benchmarks/results/gpus.md). With Megatron, the
    activations and the experts count whole, so the estimate is high. Adapters are not
    counted, and a frozen base needs 2 to 4 bytes a parameter instead of 16.
    """
    width = _BYTES[config.model.dtype]
    rollout = _rollout(config.rollout, size, width)
    if config.async_training.colocated:  # both sides have one copy of the next weights
        rollout["staged weights"] = 0
    return {"trainer": _trainer(config, size, width), "rollout": rollout}


def _trainer(config: Config, size: Size, width: int) -> dict[str, int]:
    model, tokens = config.model, config.actor.ppo_max_token_len_per_gpu
    trained = width if model.lora_rank else _STATE
    per_parameter = trained + (_STATE if config.needs_critic else 0)
    # With adapters, the reference is the same base with other adapters.
    per_parameter += 4 if config.needs_reference and not model.lora_rank else 0
    recomputing = (
        round(size.layers * model.gradient_checkpointing_share)
        if model.gradient_checkpointing
        else 0
    )
    whole = tokens * (6 * size.hidden + 3 * size.intermediate)
    values = whole * (size.layers - recomputing) + tokens * size.hidden * recomputing
    values += whole if recomputing else 0  # the layer that recomputes now
    state = 0 if config.trainer.offload_policy else size.parameters * per_parameter
    megatron = config.trainer.engine == "megatron"
    return {
        "state": _megatron_state(config.trainer, size, width, reference=config.needs_reference)
        if megatron
        else state // config.shard_size,
        "activations": values * width,
        "logits": _CHUNK,
    }


def _megatron_state(trainer: TrainerConfig, size: Size, width: int, *, reference: bool) -> int:
    """Return the bytes of a rank's weights, float32 gradients, reference, and optimizer state.

    Tensor and pipeline parallelism divide all of it. The distributed optimizer divides only its own
    state among the other ranks: moments, and float32 weights unless the model's are float32.
    """
    own = trainer.megatron
    parts = own.tensor_model_parallel_size * own.pipeline_model_parallel_size
    own_state = 12.0 if width < 4 else 8.0
    if own.use_distributed_optimizer:
        own_state *= parts / trainer.ranks
    return int(size.parameters / parts * (width * (1 + reference) + 4 + own_state))


def _rollout(r: RolloutConfig, size: Size, width: int) -> dict[str, int]:
    weights = size.parameters * width // r.tensor_model_parallel_size
    kept = (r.session_kv_slots or 0) if r.engine == "torch" else 0
    cells = (r.max_num_seqs + kept) * r.max_len * 2 * size.layers * size.kv_width
    return {
        "weights": weights,
        "staged weights": weights,
        "KV cache of all sequences": cells * width // r.tensor_model_parallel_size,
    }
