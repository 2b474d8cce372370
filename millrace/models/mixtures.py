"""Mixtures of experts: the models whose routers millrace replays and measures."""

from __future__ import annotations

from typing import Any

from millrace.config import ModelConfig
from millrace.errors import bad_value

MODEL_TYPES = ("qwen3_moe", "mixtral")


def experts_of(hf: Any) -> int:
    """Return the number of experts of a layer: 0 for a dense model."""
    return int(getattr(hf, "num_experts", None) or getattr(hf, "num_local_experts", None) or 0)


def check_replay(hf: Any, model: ModelConfig) -> None:
    """Raise ConfigError if the routers of this model cannot be replayed."""
    if model.router_replay != "disabled" and hf.model_type not in MODEL_TYPES:
        raise bad_value(
            "model.router_replay",
            model.router_replay,
            f"it needs a mixture of experts of type {' or '.join(MODEL_TYPES)}, and model.path is "
            f"of type {hf.model_type}",
            "model.router_replay=disabled",
        )
