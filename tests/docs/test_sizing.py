"""The sizing table of docs/megatron.md is what the dry run computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from millrace.config import recipe
from millrace.run.memory import estimate, size_of
from tests.docs.pages import ROOT, codes, rows

GIB = 2**30
HEADS: dict[str, Any] = {"num_key_value_heads": 8, "head_dim": 128}
MODELS: dict[str, Any] = {
    "1.5B": Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    ),
    "7B": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
    ),
    "32B": Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64,
        num_attention_heads=64, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"],
        **HEADS,
    ),
    "70B": LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
        **HEADS,
    ),
    "30B-A3B": Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=48, num_attention_heads=32, num_experts=128, num_experts_per_tok=8,
        tie_word_embeddings=False, architectures=["Qwen3MoeForCausalLM"],
        **HEADS | {"num_key_value_heads": 4},
    ),
}  # fmt: skip
"""The sizes of Qwen2.5, Qwen3 and Llama 3.1."""
SHORT = {
    "TP": ("tensor_model_parallel_size",),
    "PP": ("pipeline_model_parallel_size",),
    "EP": ("expert_model_parallel_size",),
}


def keys_of(cell: str) -> list[str]:
    """Return the overrides of a cell such as `megatron TP4 PP2`."""
    engine, *sizes = cell.split()
    own = "trainer.megatron."
    keys = ["model.gradient_checkpointing=true", f"trainer.engine={engine}"]
    for size in sizes:
        keys += [f"{own}{name}={size[2:]}" for name in SHORT[size[:2]]]
        keys += [f"{own}sequence_parallel=true"] if size.startswith("TP") else []
    return keys


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for name, hf in MODELS.items():
        hf.save_pretrained(folder / name)
        found[name] = size_of(recipe.load("quickstart", [f"model.path={folder / name}"]).model)
    return found


def test_the_sizing_table_is_what_the_dry_run_prints(sizes: dict[str, Any]) -> None:
    table = rows(Path(ROOT / "docs" / "megatron.md"), "model")
    assert len(table) >= 10 and {cells[0] for cells in table} == set(MODELS)
    base = ["model.dtype=bfloat16", "actor.ppo_max_token_len_per_gpu=16384"]
    for model, gpus, keys, *said in table:
        ranks = [f"trainer.nnodes={-(-int(gpus) // 8)}"]
        ranks += [f"trainer.n_gpus_per_node={min(int(gpus), 8)}"]
        config = recipe.load("quickstart", [*base, *ranks, *keys_of(codes(keys)[0])])
        parts = estimate(config, sizes[model])["trainer"]
        state = parts["weights and moments"] + parts["gradients"]
        whole = sum(parts.values())
        assert said == [f"{state / GIB:.0f}", f"{(whole - state) / GIB:.0f}", f"{whole / GIB:.0f}"]
