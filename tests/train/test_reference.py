"""The independent model reads whole rows until its time ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millrace.config import ModelShape
from millrace.models.model import load_model, write_shape
from millrace.train import reference
from millrace.train.rows import rows_of_samples
from tests.train.samples import VOCAB, random_samples

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[0, 4], ids=["dense", "experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    shape = ModelShape(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_experts=request.param
    )
    write_shape(path, shape, vocab_size=VOCAB, eos_token_id=0)
    return path


def read(folder: str, seconds: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    weights = load_model(Path(folder), seed=1, dtype="float32").named_parameters()
    return reference.log_probs_and_ranks(
        folder,
        iter(weights),
        rows_of_samples(random_samples(0, [4, 3])),
        0.7,
        dtype=dtype,
        device=CPU,
        trust_remote_code=False,
        computes=True,
        seconds=seconds,
    )


def test_rows_that_were_not_read_in_time_are_nan(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read(folder, 3600.0)
    assert whole.isfinite().all()
    monkeypatch.setitem(reference._CELLS, "cpu", VOCAB)  # one row in a batch
    alone, some = read(folder, 3600.0), read(folder, 0.0)
    torch.testing.assert_close(alone, whole, rtol=1e-9, atol=1e-9)
    known = some.isfinite().all(0)
    assert known[-1] and 1 < known.sum() < len(known)
    assert torch.equal(some[:, known], alone[:, known])


def test_a_model_without_room_says_so(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "free_memory", lambda device: 0)
    assert not read(folder, 3600.0).any()
