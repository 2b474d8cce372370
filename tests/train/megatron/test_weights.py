"""Tests of weights between Hugging Face folders and Megatron ranks, over two ranks, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.models.model import load_model
from millrace.sync.buckets import Spec
from millrace.sync.table import check_cover
from tests.train.cases import start_ranks

pytest.importorskip("megatron.core")

from tests.train.megatron.cases import MODELS
from tests.train.megatron.weight_cases import CASES, run_rank

pytestmark = pytest.mark.xdist_group("megatron weights")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    path = str(tmp_path_factory.mktemp("models"))
    for name, hf in MODELS.items():
        hf.save_pretrained(f"{path}/{name}")
        model = load_model(f"{path}/{name}", seed=1, dtype="float32")
        with torch.no_grad():
            for p in model.parameters():  # also norms and biases differ, and -0.0 stays -0.0
                p.add_(torch.randn_like(p) / 10).view(-1)[0] = -0.0
        model.save_pretrained(f"{path}/{name}")
    return path


@pytest.fixture(scope="module")
def ranks(folder: str) -> list[dict[str, Any]]:
    start_ranks(run_rank, (folder,), 2)
    return [torch.load(f"{folder}/weights-{rank}.pt", weights_only=False) for rank in range(2)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int32)


@pytest.fixture(scope="module")
def models(folder: str) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: dict(load_model(f"{folder}/{name}", seed=0, dtype="float32").named_parameters())
        for name in MODELS
    }


@pytest.mark.parametrize("name", CASES)
def test_whole_weights_and_exports_are_bit_for_bit_those_of_the_folder(
    name: str, folder: str, ranks: list[dict[str, Any]], models: dict[str, Any]
) -> None:
    want = models[CASES[name].model]
    for rank in ranks:
        assert list(rank[name]["whole"]) == list(want)
        for key, tensor in rank[name]["whole"].items():
            assert torch.equal(bits(tensor), bits(want[key])), key
    exported = AutoModelForCausalLM.from_pretrained(f"{folder}/{name} exported")
    for key, tensor in exported.named_parameters():
        assert torch.equal(bits(tensor), bits(want[key])), key


@pytest.mark.parametrize("name", CASES)
def test_the_rows_that_ranks_send_cover_every_tensor_once(
    name: str, ranks: list[dict[str, Any]], models: dict[str, Any]
) -> None:
    want = models[CASES[name].model]
    specs = [Spec(n, shape, "float32") for n, shape, *_ in ranks[0][name]["shards"]]
    assert [(s.name, s.shape) for s in specs] == [(n, tuple(t.shape)) for n, t in want.items()]
    table = {}
    for number, rank in enumerate(ranks):
        assert [s[:3] for s in rank[name]["shards"]] == [s[:3] for s in ranks[0][name]["shards"]]
        table[number] = {n: (a, len(t)) for n, _, _, a, t in rank[name]["shards"] if len(t)}
        for key, _, _, first, rows in rank[name]["shards"]:
            assert torch.equal(bits(rows), bits(want[key][first : first + len(rows)])), key
    check_cover(specs, table)
    if "TP2" in name or "PP2" in name or "EP2" in name:
        sizes = [sum(t.numel() for *_, t in rank[name]["shards"]) for rank in ranks]
        assert max(sizes) < 0.8 * sum(sizes), "both ranks send"
