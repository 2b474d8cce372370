"""Shapes of new models, written as Hugging Face folders.

transformers writes the same files, but its import takes the longest part of a small run's start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from millrace.config import ModelShape


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
    """Write config.json (a Qwen2 of this shape) and generation_config.json to `folder`, no weights.

    `initializer_range` is 0.5 / sqrt(hidden_size). Qwen2's fixed 0.02 is too small: narrow models
    do not learn from it.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    ids = {
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }
    sizes = {name: size for name, size in shape.model_dump().items() if name != "vocab_size"}
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **sizes,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": 0.5 / shape.hidden_size**0.5,
        "dtype": dtype,
        **ids,
    }
    for name, content in (("config.json", config), ("generation_config.json", ids)):
        (Path(folder) / name).write_text(json.dumps(content, indent=2) + "\n")
