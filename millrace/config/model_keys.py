"""The keys of the policy and of its supervised warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from millrace.config.section import Compared, Fixed, Home, OneOrMore, Past, Rule, Section, Sources

_BUILT = Fixed(
    "the model was built with it",
    lambda now, before, key: bool(now.model.path),
    "another value without model.path",
)
_ADAPTED = Fixed(
    "the adapters were trained with it",
    lambda now, before, key: not now.model.lora_rank,
    "another value with adapters",
)
_COMPLETE = Past("the warm-up of the checkpoint is complete")


class ModelShape(Section):
    hidden_size: Annotated[int, _BUILT] = Field(64, ge=1)
    """Width of the hidden states."""
    num_hidden_layers: Annotated[int, _BUILT] = Field(3, ge=1)
    """Number of decoder layers."""
    num_attention_heads: Annotated[int, _BUILT] = Field(4, ge=1)
    """Number of query heads."""
    num_key_value_heads: Annotated[int, _BUILT] = Field(2, ge=1)
    """Number of key and value heads."""
    intermediate_size: Annotated[int, _BUILT] = Field(192, ge=1)
    """Width of the MLP, or of each expert."""
    num_experts: Annotated[int, _BUILT] = Field(0, ge=0)
    """Experts of each layer. 0 builds a dense Qwen2, any other number a Qwen3-MoE."""
    num_experts_per_tok: Annotated[int, _BUILT] = Field(2, ge=1)
    """Experts that read each token, if there are experts."""
    tie_word_embeddings: Annotated[bool, _BUILT] = True
    """Use one matrix for input and output embeddings."""
    vocab_size: Annotated[int, _BUILT] = Field(0, ge=0)
    """Size of the vocabulary.

    0 means the size of the tokenizer. Set it for models without a tokenizer.
    """

    def rules(self, here: str) -> Iterator[Rule]:
        experts, key, chosen = self.num_experts, "num_experts_per_tok", self.num_experts_per_tok
        rule = f"must be at most model.shape.num_experts = {experts}"
        yield 0 < experts < chosen, key, rule, f"{here}{key}={experts}"
        idle = not experts and chosen != ModelShape.model_fields[key].default
        rule = "model.shape.num_experts is 0, so the model is dense"
        yield idle, key, rule, f"model.shape.num_experts={4 * chosen}"
        heads = self.num_attention_heads
        rule = f"must divide model.shape.hidden_size = {self.hidden_size}"
        yield self.hidden_size % heads, "num_attention_heads", rule, "a divisor of the width"
        size = self.hidden_size // heads
        yield (
            size % 2,
            "hidden_size",
            f"the head size hidden_size / num_attention_heads = {size} must be even",
            "a multiple of 2 x num_attention_heads",
        )
        rule = f"must divide model.shape.num_attention_heads = {heads}"
        wrong = heads % self.num_key_value_heads
        yield wrong, "num_key_value_heads", rule, "a divisor of the heads"


class ModelConfig(Section):
    path: Annotated[str, Home, Compared("another model")] = ""
    """Folder or hub id of a Hugging Face causal model with its tokenizer.

    Empty builds a new Qwen2 or Qwen3-MoE from model.shape.
    """
    override_config: Annotated[dict[str, Any], Fixed("the model was trained with it")] = Field(
        default_factory=dict
    )
    """Other values of keys in the model's config.json, such as rope_theta=1000000.

    All engines and the export use them. They need a model in a folder, or a newly built one. Keys
    that the weights depend on are refused.
    """
    shape: ModelShape = ModelShape()
    """Shape of the model that is built if model.path is empty. Its weights are random."""
    tokenizer: Annotated[Literal["chars", "bpe"], _BUILT] = "chars"
    """Tokenizer of a newly built model.

    chars has one token for each character of the data. bpe learns byte pairs from the data.
    """
    tokenizer_vocab_size: Annotated[
        int,
        Fixed(
            "the tokenizer was built with it",
            lambda now, before, key: bool(now.model.path) or now.model.tokenizer == "chars",
            "another value with a bpe tokenizer of millrace's",
        ),
    ] = Field(512, ge=8)
    """Largest number of tokens of a bpe tokenizer that is learned from the data."""
    dtype: Annotated[Literal["float32", "bfloat16"], _ADAPTED] = "float32"
    """Dtype of the rollout engine's weights and of the train engine's computation.

    Master weights are always float32.
    """
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. This takes less memory and more time."""
    gradient_checkpointing_share: float = Field(1.0, gt=0, le=1)
    """Share of the decoder layers that recompute their activations.

    A smaller share is faster and takes more memory.
    """
    compile: bool = False
    """Use torch.compile for each decoder layer and for the log-probs over the vocabulary.

    The first training step waits for the compilation.
    """
    router_replay: Annotated[
        Literal["disabled", "R2", "R3"],
        Fixed(
            "its samples in flight have experts with R3 alone",
            lambda now, before, key: (
                "R3" not in (now.model.router_replay, before.model.router_replay)
            ),
            "a change from or to R3",
        ),
    ] = "disabled"
    """The experts that training uses for each token of a mixture of experts.

    disabled lets the router choose again. R3 takes those that the rollout engine chose. R2 takes
    those of the pass that computes the old log-probs. Gradients reach the router in all cases.
    """
    trust_remote_code: bool = False
    """Whether code in the model's folder may run."""
    lora_rank: Annotated[int, Fixed("the trained weights have that rank")] = Field(0, ge=0)
    """Train low-rank adapters of this rank and freeze the model's own weights.

    0 trains all weights. Needs the extra millrace[lora].
    """
    lora_alpha: Annotated[float, _ADAPTED] = Field(16.0, gt=0)
    """The output of an adapter is scaled by lora_alpha / lora_rank."""
    target_modules: Annotated[tuple[str, ...], OneOrMore, _ADAPTED] = ("all-linear",)
    """Linear modules of the decoder layers that get adapters.

    all-linear, or ends of module names, such as [q_proj, v_proj].
    """

    @property
    def lora_scale(self) -> float:
        """The factor of B @ A, if there are adapters."""
        return self.lora_alpha / self.lora_rank

    def rules(self, here: str) -> Iterator[Rule]:
        names = self.target_modules
        key, fix = "target_modules", "model.target_modules=all-linear, or [q_proj,v_proj]"
        yield not names, key, "without a module, adapters train nothing", fix
        rule = "all-linear must be the only name, because it already means every linear module"
        yield "all-linear" in names and len(names) > 1, key, rule, fix
        widest = min(self.shape.hidden_size, self.shape.intermediate_size)
        yield (
            not self.path and self.lora_rank > widest,
            "lora_rank",
            f"an adapter with a rank over min(hidden_size, intermediate_size) = {widest} is "
            "larger than the matrix that it adapts",
            f"model.lora_rank={max(1, widest // 4)}",
        )


class SftConfig(Section):
    steps: Annotated[int, _COMPLETE] = Field(0, ge=0)
    """Supervised optimizer steps before RL.

    0 skips the warm-up. If a later layer sets model.path, steps becomes 0.
    """
    batch_size: Annotated[int, _COMPLETE] = Field(128, ge=1)
    """Demonstrations in one step."""
    demonstrations: Annotated[int, _COMPLETE] = Field(0, ge=0)
    """Demonstrations in all. They are made once, and come again. 0 makes new ones for each step.

    Every demonstration of an agent is an episode that it plays. Few of them suit a slow agent.
    """
    lr: Annotated[float, _COMPLETE] = Field(5e-3, gt=0)
    """Peak learning rate. After lr_warmup_steps it falls linearly to 0."""
    lr_warmup_steps: Annotated[int, _COMPLETE] = Field(20, ge=0)
    """Steps of linear learning rate warm-up."""
    messiness: Annotated[float, _COMPLETE] = Field(0.0, ge=0, le=1)
    """Share of demonstrations with a corrupted answer.

    The model then learns the form but not the answer, which leaves work for RL.
    """
    files: Annotated[Sources, _COMPLETE] = ()
    """Sources of demonstrations.

    Empty uses data.train_files, whose rows then need an `answer` or a ground truth.
    """
    teacher: Annotated[str, _COMPLETE] = ""
    """Name of a teacher whose distributions the warm-up learns too: teachers.NAME, in the trainer."""
    teacher_coef: Annotated[float, _COMPLETE] = Field(0.5, gt=0, le=1)
    """With a teacher: share of the forward KL in the loss. 1 learns from its distributions alone."""
    teacher_topk: Annotated[int, _COMPLETE] = Field(32, ge=1)
    """With a teacher: tokens of each distribution. All others are one class."""
