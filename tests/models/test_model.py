from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.config import ModelShape
from millrace.data.tokenizer import make_tokenizer
from millrace.errors import ConfigError
from millrace.models.model import eos_ids, folder_eos_ids, load_model, write_shape

SHAPE = ModelShape(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=32,
)


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    write_shape(
        tmp_path,
        SHAPE,
        vocab_size=19,
        bos_token_id=0,
        eos_token_id=[1, 4],
        pad_token_id=2,
        max_position_embeddings=64,
    )
    return tmp_path


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_shape_becomes_a_qwen2_folder_without_weights(folder: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen2" and config["architectures"] == ["Qwen2ForCausalLM"]
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (16, 2, 19)
    assert config["initializer_range"] == 0.5 / 4 and config["tie_word_embeddings"]
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "generation_config.json"]


def test_a_shape_with_experts_becomes_a_mixture(tmp_path: Path) -> None:
    shape = SHAPE.model_copy(update={"num_experts": 4, "num_experts_per_tok": 3})
    write_shape(tmp_path, shape, vocab_size=19)
    model: Any = load_model(tmp_path, seed=7, dtype="float32")
    assert model.config.model_type == "qwen3_moe" and model.config.head_dim == 8
    tokens = torch.arange(19)[None]
    for layer in model.model.layers:
        assert layer.mlp.experts.gate_up_proj.shape == (4, 2 * 32, 16)
        chosen = layer.mlp.gate(torch.randn(5, 16))[-1]
        assert chosen.shape == (5, 3) and int(chosen.max()) < 4
    assert model(tokens).logits.isfinite().all()


def test_the_same_seed_gives_the_same_bits_and_leaves_the_global_random_state_alone(
    folder: Any,
) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = load_model(folder, seed=7, dtype="float32")
    assert torch.equal(torch.rand(3), expected)
    assert same(first, load_model(folder, seed=7, dtype="float32"))
    assert not same(first, load_model(folder, seed=8, dtype="float32"))
    assert not first.training


def test_bfloat16_weights_are_the_float32_ones_rounded_and_rotary_buffers_stay_float32(
    folder: Any,
) -> None:
    full, half = (load_model(folder, seed=7, dtype=d) for d in ("float32", "bfloat16"))
    assert all(
        torch.equal(x.bfloat16(), y)
        for x, y in zip(full.parameters(), half.parameters(), strict=True)
    )
    assert {b.dtype for b in half.buffers()} == {torch.float32}
    assert half.lm_head.weight is half.model.embed_tokens.weight


def test_saved_weights_are_loaded_whatever_the_seed(folder: Any, tmp_path: Path) -> None:
    model = load_model(folder, seed=7, dtype="float32")
    model.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved", seed=9, dtype="float32")
    assert same(model, again)
    assert eos_ids(again) == eos_ids(model) == (1, 4)


def test_a_response_ends_at_the_tokenizers_own_end_too(folder: Any, tmp_path: Path) -> None:
    """A fine-tuned model may have changed its tokenizer alone."""
    load_model(folder, seed=7, dtype="float32").save_pretrained(tmp_path)
    assert folder_eos_ids(tmp_path) == (1, 4)
    tokenizer = make_tokenizer("chars", ["ab"], 0)
    tokenizer.eos_token = "a"
    tokenizer.save_pretrained(tmp_path)
    assert folder_eos_ids(tmp_path) == (1, 4, tokenizer.convert_tokens_to_ids("a"))


def test_a_folder_without_model_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_model(tmp_path, seed=0, dtype="float32")
