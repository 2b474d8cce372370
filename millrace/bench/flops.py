"""Model FLOPs of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millrace.config import Config


def train_flops(model_folder: Path, lengths: list[int], config: Config) -> float:
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
    shape: dict[str, Any] = json.loads((model_folder / "config.json").read_text())
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
    if config.model.lora_rank:
        from millrace.train.fsdp.lora import num_trained

        per_token = 4.0 * weights + 6.0 * num_trained(model_folder, config.model)
    return sum(per_token * n + 6.0 * layers * heads * head * n * n for n in lengths)
