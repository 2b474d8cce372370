"""The independent model reads whole rows until its time ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millrace.config import ModelShape
from millrace.models.model import load_model, write_shape
from millrace.sync.eight_bit import quantise
from millrace.train import reference
from millrace.train.rows import rows_of_samples
from tests.train.samples import VOCAB, random_samples

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[0, 4], ids=["dense", "experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("experts" if request.param else "dense"))
    shape = ModelShape(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_experts=request.param
    )
    write_shape(path, shape, vocab_size=VOCAB, eos_token_id=0)
    return path


def read(
    folder: str, seconds: float, dtype: torch.dtype = torch.float64, *, eight_bit: bool = False
) -> torch.Tensor:
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
        eight_bit=eight_bit,
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


def test_a_model_in_8_bits_rounds_weights_and_what_linear_layers_read(folder: str) -> None:
    """The other model has layers that multiply the numbers, and scale the products."""
    if "experts" in folder:
        pytest.skip("experts are refused in 8 bits")
    own = load_model(Path(folder), seed=1, dtype="float32").double()
    head = own.get_output_embeddings()

    def by_numbers(layer: torch.nn.Linear) -> None:
        numbers, scale = quantise(layer.weight.detach())

        def forward(x: torch.Tensor) -> torch.Tensor:
            read, sizes = quantise(x)
            product = (read.double() @ numbers.double().T) * sizes.double() * scale.double().T
            return product if layer.bias is None else product + layer.bias

        layer.forward = forward  # type: ignore[assignment, method-assign]

    layers = [m for m in own.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    for layer in layers:
        by_numbers(layer)
    rows = rows_of_samples(random_samples(0, [4, 3]))
    found, exact = read(folder, 3600.0, eight_bit=True), read(folder, 3600.0)
    want = torch.zeros_like(found)
    for batch in reference._batches(rows, 1 << 20):
        with torch.no_grad():
            reference._read(own, rows, batch, 0.7, want)
    torch.testing.assert_close(found[0, :-1], want[0, :-1], rtol=1e-4, atol=1e-4)
    assert (found - exact)[0, :-1].abs().max() > 1e-3
