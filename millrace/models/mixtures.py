"""Mixtures of experts: the models whose routers millrace replays and measures."""

from __future__ import annotations

from typing import Any

from millrace.errors import bad_value

MODEL_TYPES = ("qwen3_moe", "mixtral")


def experts_of(hf: Any) -> int:
    """Return the number of experts of a layer: 0 for a dense model."""
    return int(getattr(hf, "num_experts", None) or getattr(hf, "num_local_experts", None) or 0)


def check_mixture(hf: Any, replay: str, aux_loss_coef: float) -> None:
    """Raise ConfigError if the routers of this model cannot be replayed or balanced."""
    for key, value, off in (
        ("model.router_replay", replay, "disabled"),
        ("actor.router_aux_loss_coef", aux_loss_coef, 0.0),
    ):
        if value != off and hf.model_type not in MODEL_TYPES:
            rule = (
                f"it needs a mixture of experts of type {' or '.join(MODEL_TYPES)}, and the model "
                f"is of type {hf.model_type}"
            )
            raise bad_value(key, value, rule, f"{key}={off}")
