"""The models of the FSDP engine, before any training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.config import ModelShape
from millrace.models.model import load_model, write_shape
from millrace.train.fsdp.critic import PackedCritic
from millrace.train.fsdp.policy import PackedPolicy


@pytest.mark.parametrize("wrap", [PackedPolicy, PackedCritic])
def test_the_pad_token_has_a_gradient_as_an_input(wrap: Callable[..., Any], tmp_path: Path) -> None:
    shape = ModelShape(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
    )
    write_shape(tmp_path, shape, vocab_size=8, eos_token_id=2, pad_token_id=2)
    model: Any = load_model(tmp_path, seed=0, dtype="float32")
    assert model.get_input_embeddings().padding_idx == 2  # transformers drops the gradient
    wrap(model)
    embedding = model.get_input_embeddings()
    embedding(torch.tensor([2, 3])).sum().backward()
    assert embedding.weight.grad[2].all()
