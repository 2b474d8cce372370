"""Shapes of new models, written as Hugging Face folders.

transformers writes the same files, but its import takes the longest part of a small run's start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from millrace.config import ModelShape

_WIDTHS = ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner")
"""Names of the width of an MLP in config.json. GPT-2 without a width has 4 x the hidden size."""


def mlp_width(hf: Any) -> int:
    """Return the width of the MLP of a model with this config.json, or of one of its experts."""
    given = (getattr(hf, name, None) for name in _WIDTHS)
    return next((width for width in given if width), 4 * hf.hidden_size)


def keys_of_shape(shape: ModelShape) -> dict[str, Any]:
    """Return the keys of config.json that the shape decides, without its vocabulary."""
    keys = shape.model_dump(exclude={"vocab_size", "num_experts", "num_experts_per_tok"})
    if not shape.num_experts:
        return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **keys}
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **keys,
        "head_dim": shape.hidden_size // shape.num_attention_heads,
        "moe_intermediate_size": shape.intermediate_size,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "norm_topk_prob": True,
    }


def write_shape(
    folder: str | Path,
    shape: ModelShape,
    *,
    vocab_size: int,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    max_position_embeddings: int = 32768,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> None:
    """Write config.json (a model of this shape) and generation_config.json to `folder`, no weights.

    `initializer_range` is 0.5 / sqrt(hidden_size). Qwen's fixed 0.02 is too small: narrow models
    do not learn from it.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    ids = {
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }
    config = {
        **keys_of_shape(shape),
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": 0.5 / shape.hidden_size**0.5,
        "dtype": dtype,
        **ids,
    }
    for name, content in (("config.json", config), ("generation_config.json", ids)):
        (Path(folder) / name).write_text(json.dumps(content, indent=2) + "\n")
