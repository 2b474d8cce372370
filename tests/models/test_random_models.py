"""The random models of the tests: a permuted context moves their log-probs by over 0.5 nat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.models.model import load_model
from tests.conformance import test_engines as conformance
from tests.decode import helpers as decode
from tests.random_models import MOVES, write_random
from tests.train import cases as train
from tests.train import mixtures

pytest.importorskip("megatron.core")
from tests.train.megatron import cases as megatron


def folders(path: Path) -> dict[str, Path]:
    """Write the models of the engines' tests, and return their folders by name."""
    train.write_models(path / "train")
    write_random(path / "conformance", conformance.SHAPE, vocab_size=conformance.VOCABULARY)
    decode.llama().save_pretrained(path / "llama")
    for name, hf in megatron.MODELS.items():
        hf.save_pretrained(path / "megatron" / name)
    found = {str(p.parent.relative_to(path)): p.parent for p in path.rglob("config.json")}
    return found | {"decode": decode.folder(), "wide": decode.folder(decode.WIDE)}


@torch.no_grad()
def moves(model: Any, length: int = 24, last: int = 4) -> float:
    """Return the mean change of the last tokens' log-probs if the tokens before are permuted."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, model.config.vocab_size, (16, length), generator=generator)
    other = ids.clone()
    for row in other:
        row[:-last] = row[:-last][torch.randperm(length - last, generator=generator)]
    one, two = (
        model(tokens).logits.log_softmax(-1)[:, -last - 1 : -1].gather(-1, ids[:, -last:, None])
        for tokens in (ids, other)
    )
    return float((one - two).abs().mean())


def test_a_permuted_context_moves_log_probs(tmp_path: Path) -> None:
    found = {
        name: moves(load_model(folder, seed=1, dtype="float32"))
        for name, folder in folders(tmp_path).items()
    }
    assert len(found) == 2 + 2 + 1 + 1 + len(megatron.MODELS) + len(mixtures.WRITTEN)
    assert {name: moved for name, moved in found.items() if moved < MOVES} == {}
