"""model.override_config: other values in a model's config.json, for every engine and the export."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.config.layers import merge
from millrace.errors import ConfigError, bad_value
from millrace.models.checks import LOGITS

_WEIGHTS = (".safetensors", ".bin", ".index.json", ".py")
_SHAPE = "the weights or the code of the model decide it"
_FIXED = {
    **dict.fromkeys(("architectures", "auto_map", "model_type", "tie_word_embeddings"), _SHAPE),
    **dict.fromkeys(("head_dim", "hidden_size", "intermediate_size", "num_hidden_layers"), _SHAPE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "vocab_size"), _SHAPE),
    **dict.fromkeys(LOGITS, "training computes plain logits, hidden x lm_head^T"),
    **dict.fromkeys(("dtype", "torch_dtype"), "model.dtype decides it"),
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), "each engine has its own"),
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_intermediate_size"), _SHAPE),
    **dict.fromkeys(("decoder_sparse_step", "mlp_only_layers"), _SHAPE),
    "eos_token_id": "generation_config.json in the model's folder decides it",
    "quantization_config": "weights are not quantised",
    "router_aux_loss_coef": "actor.router_aux_loss_coef decides it",
}


def refusal(overrides: Mapping[str, Any], settings: Mapping[str, Any]) -> ConfigError | None:
    """Return the error for an override without effect or meaning, or None.

    `settings` is the model's config.json.
    """
    from transformers import AutoConfig

    known: Any = AutoConfig.for_model(str(settings.get("model_type")))
    for key, value in overrides.items():
        name = f"model.override_config.{key}"
        if isinstance(value, Mapping) and (bad := next((k for k in value if k in _FIXED), "")):
            return bad_value(f"{name}.{bad}", value[bad], _FIXED[bad], "leave it out")
        if key in _FIXED:
            return bad_value(name, value, _FIXED[key], "leave it out")
        if "dropout" in key or key.endswith("pdrop"):  # verl's scripts set 0 for every model
            if value:
                return bad_value(name, value, "training has no dropout", f"{name}=0")
            continue
        if key in ("rope_theta", "rope_scaling") and "rope_parameters" in settings:
            fix = f"model.override_config.rope_parameters.{key.replace('scaling', 'type')}"
            return bad_value(name, value, "this model has it in rope_parameters", fix)
        if key not in settings and not hasattr(known, key):
            near = difflib.get_close_matches(key, {*settings, *known.to_dict()}, 1)
            rule = f"config.json of a {settings.get('model_type')} model has no such key"
            return bad_value(name, value, rule, near[0] if near else "leave it out")
    return None


def write(overrides: Mapping[str, Any], source: str, folder: Path) -> None:
    """Change config.json in `folder`, and link the weights and the code of `source` beside it."""
    path = folder / "config.json"
    settings = json.loads(path.read_bytes())
    merge(settings, dict(overrides))
    path.write_text(json.dumps(settings, indent=2) + "\n")
    for file in Path(source).iterdir() if source else ():
        link = folder / file.name
        if file.name.endswith(_WEIGHTS) and not link.exists():
            link.symlink_to(file.resolve())
