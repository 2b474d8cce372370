"""A Hugging Face folder from a GGUF file: the same weights, the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.data.chat import Chat
from millrace.data.rows import Problem
from millrace.errors import ConfigError
from millrace.models.gguf import unpack
from millrace.models.model import eos_ids, load_model
from millrace.models.tokenizer import load_tokenizer
from millrace.types import tokens_of
from tests.models import gguf_files


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_and_every_logit_comes_back(tmp_path: Path, tied: bool) -> None:
    model, file, folder = gguf_files.llama(tied=tied), tmp_path / "model.gguf", tmp_path / "out"
    folder.mkdir()
    gguf_files.write(file, model)
    assert unpack(file, folder) == sum(p.numel() for p in model.parameters())
    found = load_model(folder, seed=0, dtype="float32")
    expected = dict(model.named_parameters())
    assert {name for name, _ in found.named_parameters()} == set(expected)
    for name, value in found.named_parameters():
        assert torch.equal(value, expected[name]), name
    tokens = torch.arange(3, 40)[None]
    assert torch.allclose(found(tokens).logits, model(tokens).logits, atol=1e-5)
    assert eos_ids(found) == (2,)


def test_a_packed_weight_is_the_one_that_gguf_and_transformers_read(tmp_path: Path) -> None:
    model, file, folder = gguf_files.llama(), tmp_path / "model.gguf", tmp_path / "out"
    folder.mkdir()
    gguf_files.write(file, model, packed="blk.1.attn_q")
    unpack(file, folder)
    name = "model.layers.1.self_attn.q_proj.weight"
    found = dict(load_model(folder, seed=0, dtype="float32").named_parameters())[name]
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=file.name, dtype=torch.float32
    )
    assert torch.equal(found, theirs.state_dict()[name].bfloat16().float())
    lost = (found - dict(model.named_parameters())[name]).abs().max()
    kind = gguf.GGMLQuantizationType.Q8_0
    assert 0 < lost < 0.02 and kind in {t.tensor_type for t in gguf.GGUFReader(file).tensors}


def test_its_tokenizer_keeps_digits_apart_and_chats(tmp_path: Path) -> None:
    file, folder = tmp_path / "model.gguf", tmp_path / "out"
    folder.mkdir()
    gguf_files.write(file, gguf_files.llama())
    unpack(file, folder)
    chat = Chat(load_tokenizer(folder))
    pieces = [gguf_files.TOKENS[i] for i in chat.encode("a 12 a<|im_end|>")]
    assert pieces[:5] == ["a", "Ġ", "1", "2", "Ġa"] and "<|im_end|>" not in pieces
    assert chat.decode(tokens_of(chat.encode("3 * 44 = 132."))) == "3 * 44 = 132."
    assert chat.eos_ids == (2,)
    text, tokens = chat.render(Problem([{"role": "user", "content": "7"}], "test"))
    assert text == "<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n"
    assert [t for t in tokens if t < 3] == [1, 2, 1]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"architecture": "gemma"}, "'gemma'"),
        ({"words": "qwen2"}, "'qwen2'"),
        ({"added": ["blk.0.attn_sinks.weight"]}, "'blk.0.attn_sinks.weight'"),
    ],
)
def test_a_file_that_is_no_llama_of_smollm_is_refused(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    file, folder = tmp_path / "model.gguf", tmp_path / "out"
    folder.mkdir()
    gguf_files.write(file, gguf_files.llama(), **changed)
    with pytest.raises(ConfigError, match=f"{named}: .* Fix: "):
        unpack(file, folder)
    assert not list(folder.iterdir())
