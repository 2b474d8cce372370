"""An estimate of the memory that each device needs, before anything runs.

The bytes of a layer's activations were counted on tensors that autograd saves. tests/run counts
them again. docs/megatron.md has a table that this file computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from millrace.config import (
    Config,
    MegatronConfig,
    ModelConfig,
    RolloutConfig,
    TeacherConfig,
    TrainerConfig,
)
from millrace.models.mixtures import experts_of
from millrace.models.shape import mlp_width

_BYTES = {"float32": 4, "bfloat16": 2}
_OPTIMIZER = 12
"""Bytes of a trained parameter: float32 weight and both moments of AdamW."""
_GRADIENT = 4
_CHUNK = {"cpu": 1 << 26, "cuda": 1 << 27}
"""Logits in one chunk, as in millrace.train.log_probs. A device that is not named counts as GPU."""
_WHOLE_GRADIENTS = 1 << 30
"""Bytes of gradients that ranks of FSDP2 keep whole until the last micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The numbers of a decoder model that memory depends on."""

    parameters: int
    hidden: int
    intermediate: int
    """Width of the MLP, or of one expert."""
    layers: int
    kv_width: int
    """Width of the keys of one token in one layer: key-value heads x head size."""
    width: int = 0
    """Width of the queries of one token: heads x head size. 0 means hidden."""
    vocabulary: int = 0
    tied: bool = True
    experts: int = 0
    """Experts of a layer, 0 for a dense model."""
    chosen: int = 1
    """Experts that read each token."""
    head_norms: bool = False
    """Whether queries and keys are normalised, as in Qwen3."""

    @property
    def queries(self) -> int:
        return self.width or self.hidden

    @property
    def embeddings(self) -> int:
        """Parameters of one matrix of embeddings."""
        return self.vocabulary * self.hidden

    @property
    def of_experts(self) -> int:
        """Parameters of all experts."""
        return self.layers * self.experts * 3 * self.hidden * self.intermediate

    @property
    def of_layers(self) -> int:
        """Parameters of all layers, without experts."""
        return self.parameters - self.of_experts - self.embeddings * (1 if self.tied else 2)


def size_of(section: ModelConfig) -> Size | None:
    """Return the size of the policy, or None if only its data decides it.

    The model is built on the meta device, without its weights. A new model needs
    model.shape.vocab_size.
    """
    if not (section.path or section.shape.vocab_size):
        return None
    from millrace.models.model import empty_model, shape_config

    source = section.path or shape_config(section)
    model = empty_model(source, trust_remote_code=section.trust_remote_code)
    return size_of_model(model.config.get_text_config(), sum(p.numel() for p in model.parameters()))


def size_of_model(hf: Any, parameters: int) -> Size:
    """Return the size of a model with this config.json and this number of parameters."""
    heads = hf.num_attention_heads
    head = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    experts = experts_of(hf)
    return Size(
        parameters=parameters,
        hidden=hf.hidden_size,
        intermediate=mlp_width(hf),
        layers=hf.num_hidden_layers,
        kv_width=head * (getattr(hf, "num_key_value_heads", None) or heads),
        width=heads * head,
        vocabulary=hf.vocab_size,
        tied=bool(hf.tie_word_embeddings),
        experts=experts,
        chosen=hf.num_experts_per_tok if experts else 1,
        head_norms=hf.model_type.startswith("qwen3"),
    )


def estimate(
    config: Config, size: Size, *, micro_batches: int = 2, tokens: int = 0
) -> dict[str, dict[str, int]]:
    """Return the bytes on one device of each side, by their use.

    trainer   all at the moment of the peak. It is the start of a backward pass, with all
              activations and a chunk of logits. From the second micro-batch of an optimizer step
              on, there are gradients too. With one micro-batch, it may be the end instead. With
              Megatron, gradients are always there, and the peak may be AdamW's step.
    rollout   weights, the staged weights of the next version, and the KV cache of
              rollout.max_num_seqs + session_kv_slots full sequences, divided by tensor_model_parallel_size.

    With pipeline parallelism, it is the first or the last stage. It assumes that experts get
    equally many tokens. Adapters are not counted. A micro-batch has `tokens` on each device. 0
    means a full one.
    """
    tokens = tokens or config.actor.ppo_max_token_len_per_gpu
    width = _BYTES[config.model.dtype]
    rollout = _rollout(config.rollout, size, width)
    if config.async_training.colocated:  # both sides have one copy of the next weights
        rollout["staged weights"] = 0
    trainer, models = config.trainer, (config.needs_reference, config.algorithm.needs_critic)
    if trainer.engine == "megatron":
        parts = _megatron(config.model, tokens, trainer, size, reference=models[0])
    else:
        parts = _fsdp(config.model, tokens, trainer, size, *models)
    parts["teachers"] = _teachers(config.teachers.values(), config.model, trainer)
    passing = parts["activations"] + parts["logits"]
    if trainer.engine != "megatron" and micro_batches == 1 and parts["gradients"] <= passing:
        parts["gradients"] = 0
    elif trainer.engine != "megatron" and micro_batches == 1:
        parts |= {"activations": 0, "logits": 0}
    return {"trainer": {name: n for name, n in parts.items() if n}, "rollout": rollout}


def _teachers(teachers: Iterable[TeacherConfig], model: ModelConfig, trainer: TrainerConfig) -> int:
    """Return the bytes of this device's shares of the teachers, which have float32 weights."""
    if trainer.offload_policy:
        return 0
    own = ({"path": one.path, "override_config": {}} for one in teachers if not one.outside)
    sizes = (size_of(model.model_copy(update=one)) for one in own)
    return sum(4 * s.parameters for s in sizes if s is not None) // trainer.shard_size


def _fsdp(
    model: ModelConfig,
    tokens: int,
    trainer: TrainerConfig,
    size: Size,
    reference: bool,
    critic: bool,
) -> dict[str, int]:
    width = _BYTES[model.dtype]
    adapted = model.lora_rank > 0
    base = width if adapted else _OPTIMIZER
    # With adapters, the reference is the same base with other adapters.
    state = base + critic * _OPTIMIZER + (reference and not adapted) * 4
    trained = (not adapted) + critic
    gradients = _GRADIENT * size.parameters
    shards = 1 if gradients <= _WHOLE_GRADIENTS else trainer.shard_size
    home = 0 if trainer.offload_policy else 1
    # Ranks gather the embeddings and two layers, in the dtype of the passes.
    gathers = trainer.ranks > 1 or width < 4 or trainer.offload_policy
    layers = 2 * (size.of_layers + size.of_experts) // max(size.layers, 1)
    matrices = size.embeddings * (1 if size.tied else 2)
    share = model.gradient_checkpointing_share if model.gradient_checkpointing else 0.0
    recomputing = round(size.layers * share)
    whole = layer_bytes(size, width, compiled=model.compile)
    values = whole * (size.layers - recomputing) + width * size.hidden * recomputing
    chunk = _CHUNK["cpu" if trainer.device == "cpu" else "cuda"]
    logits = _logits(size, width, tokens, 1, frozen=adapted, chunk=chunk)
    again = tokens * (whole + _mlp_gradients(size, width))
    again += (not adapted) * _GRADIENT * size.embeddings  # the gradient of the head is there too
    return {
        "weights and moments": home * state * size.parameters // trainer.shard_size,
        "gradients": home * trained * gradients // shards,
        "gathered weights": width * (matrices + layers) if gathers else 0,
        "activations": tokens * values + (max(0, again - logits) if recomputing else 0),
        "logits": logits,
    }


def _mlp_gradients(size: Size, width: int) -> int:
    """Return the bytes of a token's gradients in the backward pass of an MLP: three at a time."""
    return 3 * width * size.intermediate * (size.chosen if size.experts else 1)


def layer_bytes(size: Size, width: int, *, compiled: bool = False) -> int:
    """Return the bytes that the backward pass of one layer needs of one token.

    These are transformers' layers. A compiled layer keeps fewer. Its formula fits measured peaks of
    dense models on H200s.
    """
    h, i = size.hidden, size.intermediate
    if compiled and not size.experts:
        return width * (6 * h + 3 * i)
    mlp = size.chosen * (4 * i + 4 * h // 2) * width if size.experts else 4 * i * width
    return _norms(size, width) + 2 * width * (size.queries + size.kv_width) + mlp


def _norms(size: Size, width: int) -> int:
    """Return the bytes of a layer's norms: inputs in float32, normalised values, and outputs."""
    heads = (4 + width) * (size.queries + size.kv_width) if size.head_norms else 0
    return 2 * (4 + 2 * width) * size.hidden + heads


def _logits(
    size: Size,
    width: int,
    tokens: int,
    ranks: int,
    *,
    frozen: bool = False,
    chunk: int = _CHUNK["cuda"],
) -> int:
    """Return the bytes of a chunk of logits in the backward pass, and of the head's gradient.

    There are three float32 chunks and one in the dtype of the passes. The gradient is float32, and
    the product that is added to it has the same size.
    """
    rows = size.vocabulary // ranks
    return min(chunk, tokens * rows) * (12 + width) + (0 if frozen else 8 * rows * size.hidden)


def _megatron(
    model: ModelConfig, tokens: int, trainer: TrainerConfig, size: Size, *, reference: bool
) -> dict[str, int]:
    """Return the bytes of a rank on the stage that needs the most."""
    first, last = (
        _stage(model, tokens, trainer, size, last=last, reference=reference)
        for last in (False, True)
    )
    if trainer.megatron.pipeline_model_parallel_size == 1:
        return last
    return max(first, last, key=lambda parts: sum(parts.values()))


def _stage(
    model: ModelConfig,
    tokens: int,
    trainer: TrainerConfig,
    size: Size,
    *,
    last: bool,
    reference: bool,
) -> dict[str, int]:
    """Return the bytes of a rank on the first or on the last stage.

    Tensor and pipeline parallelism divide the weights. The distributed optimizer divides its own
    state among the other ranks: moments, and float32 weights unless the model's are float32.
    """
    own, width = trainer.megatron, _BYTES[model.dtype]
    tensor, stages = own.tensor_model_parallel_size, own.pipeline_model_parallel_size
    per_expert = own.expert_tensor * own.expert_model_parallel_size
    # Every end of the pipeline has a matrix of embeddings. With one stage, a tied one counts once.
    matrices = size.embeddings * (1 if stages > 1 or size.tied else 2)
    dense = (size.of_layers // stages + matrices) // tensor
    experts = size.of_experts // stages // per_expert
    state = 12 if width < 4 else 8
    copies = trainer.ranks // stages
    spread = own.use_distributed_optimizer
    moments = state * dense // (copies // tensor if spread else 1)
    moments += state * experts // (copies // per_expert if spread else 1)
    weights = dense + experts
    owned = moments // state * _GRADIENT
    layers = size.layers // stages
    kept, recomputed = _kept(model, own, size, width, layers)
    logits = _logits(size, width, tokens, tensor) if last else 0
    # The first stage begins one micro-batch for each stage before the first backward pass.
    flying = 1 if last else stages
    passing = {
        "activations": tokens * kept * flying + max(0, tokens * recomputed - logits),
        "logits": logits,
        "AdamW": 0,
    }
    if sum(passing.values()) < owned:  # torch's AdamW makes a tensor as large as a moment
        passing = {"activations": 0, "logits": 0, "AdamW": owned}
    weighed = width * weights * (1 + reference) + moments
    return {"weights and moments": weighed, "gradients": _GRADIENT * weights, **passing}


def _kept(
    model: ModelConfig, own: MegatronConfig, size: Size, width: int, layers: int
) -> tuple[int, int]:
    """Return the bytes of a token that a stage keeps, and those that it recomputes at once."""
    whole = megatron_layer_bytes(size, own, width)
    gradients = _mlp_gradients(size, width) // own.tensor_model_parallel_size
    inputs = width * size.hidden // (own.tensor_model_parallel_size if own.sequence_parallel else 1)
    granularity = own.recompute_granularity or ("full" if model.gradient_checkpointing else "")
    number = own.recompute_num_layers
    if granularity == "full" and own.recompute_method == "uniform":
        return inputs * layers // number, whole * number + gradients
    if granularity == "full":
        some = min(number, layers)
        return inputs * some + whole * (layers - some), whole + gradients
    if granularity == "selective" and {"mlp", "moe"} & set(own.recompute_modules):
        mlp = _megatron_mlp(size, own, width)
        return (whole - mlp) * layers, mlp + gradients
    return whole * layers, 0


def megatron_layer_bytes(size: Size, own: MegatronConfig, width: int) -> int:
    """Return the bytes that the backward pass of one of Megatron's layers needs of one token.

    Without sequence parallelism, every tensor-parallel rank has whole norms.
    """
    attention = 2 * width * (size.queries + size.kv_width)
    if own.context_parallel_size > 1:  # the results of attention, before and after the exchange
        attention += width * size.queries
    norms = 2 * (4 + 2 * width) * size.hidden
    of_heads = _norms(size, width) - norms
    tensor = own.tensor_model_parallel_size
    norms //= tensor if own.sequence_parallel else 1
    return norms + (attention + of_heads) // tensor + _megatron_mlp(size, own, width)


def _megatron_mlp(size: Size, own: MegatronConfig, width: int) -> int:
    """Return the part of the MLP, or of the experts that read a token."""
    if not size.experts:
        return 5 * width * size.intermediate // own.tensor_model_parallel_size
    # Ranks of tensor parallelism divide tokens or matrices of experts, so they divide this too.
    read = width * (6 * size.intermediate + size.hidden)
    return size.chosen * read // own.tensor_model_parallel_size


def _rollout(r: RolloutConfig, size: Size, width: int) -> dict[str, int]:
    weights = size.parameters * width // r.tensor_model_parallel_size
    kept = (r.session_kv_slots or 0) if r.engine == "torch" else 0
    cells = (r.max_num_seqs + kept) * r.max_len * 2 * size.layers * size.kv_width
    return {
        "weights": weights,
        "staged weights": weights,
        "KV cache of all sequences": cells * width // r.tensor_model_parallel_size,
    }
