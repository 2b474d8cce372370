"""Models that cannot work, recognised by config.json and refused before anything starts.

The lists come from tests with transformers 5.19 on tiny models of every causal type. The tests
compared packed log-probs and decoding with the model's own forward pass. Engines repeat the checks
that they can make on the loaded model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError, bad_value

REFUSED: dict[str, tuple[str, ...]] = {
    "its layers carry a state from token to token, which packed training would mix": (
        *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear"),
        *("lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid"),
        *("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        *("recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
    ),
    "its logits are scaled, capped or shifted, instead of plain hidden x lm_head^T": (
        *("cohere", "cohere2", "cohere2_moe", "ctrl", "gemma2", "gemma3n", "gemma3n_text"),
        *("minicpm3", "modernbert-decoder", "nanochat", "phi", "vaultgemma"),
    ),
    "its attention has terms that packed training does not compute": (
        *("bloom", "codegen", "deepseek_v32", "deepseek_v4", "doge", "falcon", "glm_moe_dsa"),
        *("gpt_neox_japanese", "gpt_oss", "gptj", "granite_swa", "granitemoe_swa", "hy_v4"),
        *("inkling_text", "mimo_v2_flash", "moshi", "mpt", "nemotron", "openai-gpt", "stablelm"),
        "xglm",
    ),
    "its layers cannot be read apart from its head": ("llama4", "llama4_text"),
    "it is not a causal language model": (
        *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot"),
        *("blenderbot-small", "camembert", "data2vec-text", "electra", "ernie", "marian"),
        *("mbart", "megatron-bert", "mvp", "pegasus", "plbart", "prophetnet", "rembert"),
        *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "t5", "trocr", "whisper"),
        *("xlm-roberta", "xlm-roberta-xl"),
    ),
}
"""The refused values of model_type, by the reason for the refusal."""

VLLM_ALONE = ("diffllama", "hrm_text")
"""Models that only vLLM can sample. The torch rollout engine gives a wrong distribution.

They train well.
"""

WITH_IMAGES = ("gemma3", "gemma4", "gemma4_unified")
"""Models of text and images that transformers also loads as causal models."""

LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Keys of config.json that change logits, unless they are null or 1."""

_FIX = "a causal model with standard attention, such as Qwen2, Qwen3, Llama or Mistral"


def damaged(path: Path) -> str:
    """Return which file of weights in a folder is cut off, or a pointer to one. Else ""."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            return f"its {file.name} is damaged: {error}"
    return ""


def has_weights(path: Path) -> bool:
    """Return whether a folder has weights in a form that transformers loads."""
    return any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin"))


def refusal(key: str, path: str, config: Mapping[str, Any], engine: str) -> ConfigError | None:
    """Return the error for a model that cannot work, or None if no check fails.

    `key` names the path. `engine` is that of a policy, or empty.
    """
    kind = config.get("model_type")
    why = next((why for why, kinds in REFUSED.items() if kind in kinds), "")
    fix = _FIX
    if not why and config.get("is_encoder_decoder") is True:
        why = "it is not a causal language model"
    inner = config.get("text_config")
    texts = [config, inner] if isinstance(inner, Mapping) else [config]
    if not why and (odd := [k for k in LOGITS if any(t.get(k) not in (None, 1.0) for t in texts)]):
        why = f"its logits are not plain hidden x lm_head^T ({odd[0]})"
    if not why and engine == "torch" and kind in VLLM_ALONE:
        why = "rollout.engine=torch does not compute its attention"
        fix = "rollout.engine=vllm"
    if not why and not _causal(config):
        why = f"architectures = {config['architectures']} is not a causal language model"
    return bad_value(key, path, f"model_type {kind}: {why}", fix) if why else None


def _causal(config: Mapping[str, Any]) -> bool:
    """Return whether transformers would load the model as a causal model.

    Models with custom code in the folder pass.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or "auto_map" in config:
        return True
    ends: tuple[str, ...] = ("ForCausalLM", "LMHeadModel")
    if config.get("model_type") in WITH_IMAGES:
        ends += ("ForConditionalGeneration",)
    body = ("Model",)  # no head of its own: the embeddings are the head
    return any(str(name).endswith(ends if "For" in str(name) else ends + body) for name in names)
