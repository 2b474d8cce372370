"""Tiny GGUF files of a Llama in llama.cpp's layout, written by gguf's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The bytes of ASCII in GPT-2's spelling, and one merge.
TOKENS = [*SPECIAL, *(chr(c) for c in range(33, 127)), "Ġ", "Ċ", "Ġa"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def llama(*, tied: bool = True) -> LlamaForCausalLM:
    """Return a model whose weights bfloat16 represents exactly."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = (parameter.data + 0.1).bfloat16().float()
    return model


def write(file: Path, model: LlamaForCausalLM, *, packed: str = "", **changed: Any) -> None:
    """Write a model. The weight `packed` gets 8 bits. `changed` replaces keys, dots as __."""
    config: Any = model.config
    out = gguf.GGUFWriter(file, changed.pop("architecture", "llama"))
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(changed.pop("words", "smollm"))
    out.add_token_list(TOKENS)
    out.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    out.add_token_merges(["Ġ a"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_pad_token_id(2)
    out.add_unk_token_id(0)
    out.add_chat_template(TEMPLATE)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, value in model.named_parameters():
        array = value.detach().numpy()
        *place, part = name.removesuffix(".weight").split(".", 3)
        short = NAMES.get(name.removesuffix(".weight")) or f"blk.{place[2]}.{NAMES[part]}"
        if (count := heads.get(short.rpartition(".")[2])) is not None:
            array = _for_neighbours(array, count)
        if short == packed:
            kind = gguf.GGMLQuantizationType.Q8_0
            out.add_tensor(f"{short}.weight", gguf.quantize(array, kind), raw_dtype=kind)
        else:
            out.add_tensor(f"{short}.weight", np.ascontiguousarray(array))
    for name in changed.pop("added", ()):
        out.add_tensor(name, np.zeros((32,), np.float32))
    assert not changed
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _for_neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of q or k as llama.cpp's converter does: i and i + half become neighbours."""
    size = len(rows) // heads
    order = [
        head * size + half * size // 2 + i
        for head in range(heads)
        for i in range(size // 2)
        for half in (0, 1)
    ]
    return rows[order]
