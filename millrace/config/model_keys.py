"""The keys of the policy and of its supervised warm-up."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from millrace.config.section import OneOrMore, Section, Sources
from millrace.errors import bad_value


class ModelShape(Section):
    hidden_size: int = Field(64, ge=1)
    """Width."""
    num_hidden_layers: int = Field(3, ge=1)
    """Decoder layers."""
    num_attention_heads: int = Field(4, ge=1)
    """Query heads."""
    num_key_value_heads: int = Field(2, ge=1)
    """Key and value heads."""
    intermediate_size: int = Field(192, ge=1)
    """Width of the MLP."""
    tie_word_embeddings: bool = True
    """One matrix for input and output embeddings."""
    vocab_size: int = Field(0, ge=0)
    """0 is as large as the tokenizer needs. Set it for shapes without a tokenizer."""

    def check(self) -> None:
        heads = self.num_attention_heads
        if self.hidden_size % heads:
            raise bad_value(
                "model.shape.num_attention_heads",
                heads,
                f"must divide model.shape.hidden_size = {self.hidden_size}",
                "a divisor of the width",
            )
        if (size := self.hidden_size // heads) % 2:
            raise bad_value(
                "model.shape.hidden_size",
                self.hidden_size,
                f"the head size hidden_size / num_attention_heads = {size} must be even",
                "a multiple of 2 x num_attention_heads",
            )
        if heads % self.num_key_value_heads:
            raise bad_value(
                "model.shape.num_key_value_heads",
                self.num_key_value_heads,
                f"must divide model.shape.num_attention_heads = {heads}",
                "a divisor of the heads",
            )


class ModelConfig(Section):
    path: str = ""
    """Folder or hub id of a Hugging Face causal model with its tokenizer; empty makes a
    Qwen2-shaped one on the spot."""
    shape: ModelShape = ModelShape()
    """Shape of the model that is made on the spot, with random weights."""
    tokenizer: Literal["chars", "bpe"] = "chars"
    """Tokenizer of a model made on the spot: the training data's characters, or byte pairs learned
    from it."""
    tokenizer_vocab_size: int = Field(512, ge=8)
    """Most tokens of a bpe tokenizer made on the spot."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the rollout engine's weights and of the train engine's computation. Master weights
    are always float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    gradient_checkpointing_share: float = Field(1.0, gt=0, le=1)
    """Share of the decoder layers that do so; the others keep theirs. The less, the faster, as far
    as memory goes."""
    compile: bool = False
    """torch.compile each decoder layer, and the log-probs' passes over the vocabulary, for
    training. The first step waits for it."""
    trust_remote_code: bool = False
    """Whether code in the model's folder may run."""
    lora_rank: int = Field(0, ge=0)
    """Train low-rank adapters of this rank and leave the model's own weights as they are; 0 trains
    all weights. Needs the extra millrace[lora]."""
    lora_alpha: float = Field(16.0, gt=0)
    """What adapters add is scaled by lora_alpha / lora_rank."""
    target_modules: Annotated[tuple[str, ...], OneOrMore] = ("all-linear",)
    """Which linear modules of the decoder layers get adapters: all-linear, or ends of their names,
    such as [q_proj, v_proj]."""

    @property
    def lora_scale(self) -> float:
        """Of B @ A, where there are adapters."""
        return self.lora_alpha / self.lora_rank

    def check(self) -> None:
        names = self.target_modules
        if not names or ("all-linear" in names and len(names) > 1):
            raise bad_value(
                "model.target_modules",
                list(names),
                "all-linear stands alone: it is every linear module"
                if names
                else "adapters without a module train nothing",
                "model.target_modules=all-linear, or [q_proj,v_proj]",
            )
        widest = min(self.shape.hidden_size, self.shape.intermediate_size)
        if not self.path and self.lora_rank > widest:
            raise bad_value(
                "model.lora_rank",
                self.lora_rank,
                f"an adapter of more than min(hidden_size, intermediate_size) = {widest} is larger "
                "than the matrix that it stands for",
                f"model.lora_rank={max(1, widest // 4)}",
            )


class SftConfig(Section):
    steps: int = Field(0, ge=0)
    """Supervised optimizer steps before RL; 0 skips the warm-up.

    A model.path that a later layer sets makes them 0."""
    batch_size: int = Field(128, ge=1)
    """Demonstrations in one step."""
    lr: float = Field(5e-3, gt=0)
    """Peak learning rate; linear to 0 after the warm-up steps."""
    lr_warmup_steps: int = Field(20, ge=0)
    """Steps of linear warm-up."""
    messiness: float = Field(0.0, ge=0, le=1)
    """Share of demonstrations that are corrupted: the model then knows the form but not the answer,
    and RL has work."""
    files: Sources = ()
    """Sources of demonstrations; empty takes data.train_files, whose rows must have an `answer` or
    a ground truth."""
