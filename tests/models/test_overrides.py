"""model.override_config: every engine and the export read the changed config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.config import ModelConfig, ModelShape
from millrace.models.model import load_model, write_shape
from millrace.models.overrides import refusal
from millrace.run.problems import copy_config, weights_folder

SHAPE = ModelShape(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
ROPE: dict[str, Any] = {"rope_parameters": {"rope_theta": 7.0}, "max_position_embeddings": 99}


def test_engines_read_the_changed_config_with_the_same_weights(tmp_path: Path) -> None:
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    run.mkdir()
    write_shape(theirs, SHAPE, vocab_size=19)
    model = load_model(theirs, seed=0, dtype="float32")
    model.save_pretrained(theirs)
    for _ in range(2):  # a resume does it again
        section = ModelConfig(path=str(theirs), override_config=ROPE)
        copy_config(section, run)
    changed = load_model(weights_folder(section, run), seed=1, dtype="float32")
    assert changed.config.rope_parameters == {"rope_theta": 7.0, "rope_type": "default"}
    assert changed.config.max_position_embeddings == 99
    same = zip(model.parameters(), changed.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    tokens = torch.arange(12)[None]
    assert not torch.allclose(model(tokens).logits, changed(tokens).logits)
    assert json.loads((theirs / "config.json").read_text())["max_position_embeddings"] != 99
    changed.save_pretrained(tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["rope_parameters"] == (
        changed.config.rope_parameters
    )


def test_a_newly_built_model_has_the_changed_config(tmp_path: Path) -> None:
    write_shape(tmp_path, SHAPE, vocab_size=19)
    section = ModelConfig(shape=SHAPE, override_config=ROPE)
    copy_config(section, tmp_path)
    model = load_model(weights_folder(section, tmp_path), seed=0, dtype="float32")
    assert model.config.rope_parameters["rope_theta"] == 7.0


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"hidden_size": 5}, ["hidden_size = 5", "decide it"]),
        ({"num_experts": 5}, ["num_experts = 5", "decide it"]),
        ({"text_config": {"vocab_size": 5}}, ["text_config.vocab_size = 5"]),
        ({"attention_dropout": 0.1}, ["no dropout", "attention_dropout=0"]),
        ({"eos_token_id": 5}, ["eos_token_id = 5", "generation_config.json"]),
        ({"text_config": {"final_logit_softcapping": 30.0}}, ["plain logits"]),
        ({"max_position_embeding": 5}, ["no such key", "Fix: max_position_embeddings"]),
        ({"rope_theta": 5}, ["rope_parameters.rope_theta"]),
        ({"attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}, []),
        ({"attention_dropout": 0.0, "rms_norm_eps": 1e-5, **ROPE}, []),
    ],
)
def test_an_override_without_effect_is_refused(overrides: dict[str, Any], parts: list[str]) -> None:
    error = refusal(overrides, {"model_type": "qwen2", "rope_parameters": {}})
    assert (error is None) == (not parts)
    assert all(part in str(error) for part in parts)
