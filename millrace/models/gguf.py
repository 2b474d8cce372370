"""A Hugging Face folder from a GGUF file, llama.cpp's format of one file for a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.errors import bad_value, needed

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

_OF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OF_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
"""The names of a Llama's parts in llama.cpp and in transformers."""
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""transformers' and llama.cpp's names of the keys of a Llama."""
_IDS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_CONTROL = 3
"""llama.cpp's number for tokens that no text becomes."""


def unpack(file: Path, folder: Path) -> int:
    """Write a Llama's weights in bfloat16, its config.json and its tokenizer into `folder`.

    Returns the number of parameters. What the file's few bits have lost stays lost. Raises
    ConfigError if the file has another architecture or other words, or weights that a Llama lacks.
    """
    gguf = needed("gguf", "a model in a GGUF file")
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig

    reader = gguf.GGUFReader(file)
    keys = {key: field.contents() for key, field in reader.fields.items()}
    for key, known in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
        if keys.get(key) != known:
            raise bad_value(f"{file.name}, {key}", keys.get(key), "is unknown", f"{known!r}")
    sizes = {name: keys[f"llama.{key}"] for name, key in _SIZES.items()}
    heads = {"attn_q": sizes["num_attention_heads"], "attn_k": sizes["num_key_value_heads"]}
    weights = _weights(gguf, reader, heads)
    tokenizer = _tokenizer(keys)
    ids = {f"{name}_token_id": keys[f"tokenizer.ggml.{key}_token_id"] for name, key in _IDS.items()}
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        tie_word_embeddings="lm_head.weight" not in weights,
        rope_parameters={"rope_type": "default", "rope_theta": keys["llama.rope.freq_base"]},
        **sizes,
        **ids,
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    GenerationConfig(**ids).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return sum(value.numel() for value in weights.values())


def _tokenizer(keys: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return SmolLM's tokenizer: byte pairs as in GPT-2, but every digit is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in keys["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    )
    named = {f"{n}_token": tokens[keys[f"tokenizer.ggml.{k}_token_id"]] for n, k in _IDS.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=keys["tokenizer.chat_template"],
        model_max_length=keys["llama.context_length"],
        **named,
    )


def _weights(gguf: Any, reader: Any, heads: dict[str, int]) -> dict[str, torch.Tensor]:
    """Return the weights by transformers' names.

    llama.cpp keeps the rows of q and k in another order: its rotary code turns neighbours, where
    transformers' code turns the two halves of a head.
    """
    import torch

    found = {}
    for tensor in reader.tensors:
        part, name = _name(tensor.name)
        if not name:
            raise bad_value("tensor", tensor.name, "is no part of a Llama", "a Llama's GGUF file")
        value = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if part in heads:
            pairs = value.view(heads[part], -1, 2, value.shape[-1])
            value = pairs.transpose(1, 2).reshape(value.shape)
        found[name] = value.to(torch.bfloat16).contiguous()
    return found


def _name(name: str) -> tuple[str, str]:
    """Return the part of a tensor, and transformers' name of it, or "" if there is none."""
    match name.split("."):
        case [part, "weight"] if part in _OF_MODEL:
            return part, f"{_OF_MODEL[part]}.weight"
        case ["blk", layer, part, "weight"] if part in _OF_LAYER:
            return part, f"model.layers.{layer}.{_OF_LAYER[part]}.weight"
    return name, ""
