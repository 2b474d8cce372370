"""Model FLOPs of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millrace.config import ModelConfig
from millrace.errors import bad_value

_READ = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "vocab_size",
)


def train_flops(model_folder: Path, lengths: list[int], model: ModelConfig) -> float:
    """Return the FLOPs of training on rows of `lengths` tokens, forward and backward.

    Multiplications and additions both count.

    | part | FLOPs |
    |---|---|
    | each weight that a token uses | 6 |
    | each of the n x n / 2 causal pairs of n tokens | 12 x layers x heads x head size |
    | with model.lora_rank: each weight of an adapter | 6 |
    | with model.lora_rank: each weight of the model, which has no gradient | 4 |

    The formula is for dense models with gated MLPs (Qwen2, Qwen3, Llama, Mistral). These are model
    FLOPs: recomputation (checkpointing, old log-probs) does not count, and a shared prompt counts
    for each of its responses.
    """
    shape = shape_of(model_folder)
    hidden, layers, heads = (
        shape["hidden_size"],
        shape["num_hidden_layers"],
        shape["num_attention_heads"],
    )
    head = shape.get("head_dim") or hidden // heads
    keys = shape.get("num_key_value_heads") or heads
    layer = hidden * head * (2 * heads + 2 * keys) + 3 * hidden * shape["intermediate_size"]
    weights = layers * layer + hidden * shape["vocab_size"]
    per_token = 6.0 * weights
    if model.lora_rank:
        from millrace.train.fsdp.lora import num_trained

        per_token = 4.0 * weights + 6.0 * num_trained(model_folder, model)
    return sum(per_token * n + 6.0 * layers * heads * head * n * n for n in lengths)


def shape_of(model_folder: Path) -> dict[str, Any]:
    """Return config.json. Raises ConfigError if the formula of `train_flops` does not fit."""
    shape: dict[str, Any] = json.loads((model_folder / "config.json").read_text())
    if missing := [key for key in _READ if not shape.get(key)]:
        raise bad_value(
            "model.path",
            shape.get("model_type"),
            f"the model FLOPs are those of dense models with gated MLPs, and its config.json has "
            f"no {', '.join(missing)}",
            "a model such as Qwen2, Qwen3, Llama or Mistral",
        )
    return shape
