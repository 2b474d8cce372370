"""Tests of weights between Hugging Face folders and Megatron ranks, over two ranks, bit for bit."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM

from millrace.models.model import load_model
from millrace.sync.buckets import Spec
from millrace.sync.table import check_cover
from millrace.train.fsdp import engine as fsdp
from tests.train.cases import start_ranks

pytest.importorskip("megatron.core")

from tests.train.megatron.cases import HORIZON, MODELS, OPTIM, batches, config_of
from tests.train.megatron.weight_cases import CASES, CHAINS, SYNCS, run_rank

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
    for name in CHAINS:
        engine = fsdp_engine(path, name)
        asyncio.run(engine.step(batches()[0]))
        asyncio.run(engine.save(f"{path}/{name} state of fsdp"))
        asyncio.run(engine.close())
    return path


def fsdp_engine(folder: str, name: str) -> Any:
    engine = fsdp.build(config_of("fsdp", {}, 1), f"{folder}/{name}", rank=0, world_size=1)
    engine.restart(OPTIM, HORIZON)
    return engine


@pytest.fixture(scope="module")
def ranks(folder: str) -> list[dict[str, Any]]:
    start_ranks(run_rank, (folder,), 3)
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


@pytest.mark.parametrize("name", SYNCS)
def test_a_rollout_engine_serves_each_version_that_the_ranks_sent(
    name: str, folder: str, ranks: list[dict[str, Any]]
) -> None:
    served = torch.load(f"{folder}/replica.pt", weights_only=False)[name]
    for sent in (rank[f"{name} sync"] for rank in ranks):
        assert len(sent) == len(served) == 3
        for old, new in itertools.pairwise(sent):
            assert any(not torch.equal(old[key], tensor) for key, tensor in new.items())
        for got, want in zip(served, sent, strict=True):
            assert list(got) == list(want)
            assert all(torch.equal(bits(got[key]), bits(want[key])) for key in want)


def tensors_of(state: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a state on disk, by their keys."""
    if isinstance(state, dict):
        parts = [tensors_of(value, f"{name}.{key}") for key, value in state.items()]
        return {key: tensor for part in parts for key, tensor in part.items()}
    return {name: state} if isinstance(state, torch.Tensor) else {}


def read(folder: str, target: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(folder, target)
    return tensors_of(torch.load(target, weights_only=False))


@pytest.mark.parametrize("chain", [*(f"{m} float32" for m in CHAINS), "qwen2 bfloat16"])
def test_a_state_that_went_through_other_shapes_trains_on_bit_for_bit(
    chain: str, ranks: list[dict[str, Any]], folder: str, tmp_path: Path
) -> None:
    for rank in ranks:
        found = rank[chain]
        assert found["got"]["metrics"] == found["want"]["metrics"]
        for name, tensor in found["want"]["weights"].items():
            assert torch.equal(found["got"]["weights"][name], tensor), name
    first = read(f"{folder}/{chain} state 0", tmp_path / "first")
    last = read(ranks[0][chain]["last"], tmp_path / "last")
    assert first.keys() == last.keys() and len(first) > 40
    assert all(torch.equal(last[key], tensor) for key, tensor in first.items())


@pytest.mark.parametrize("model", CHAINS)
def test_states_pass_between_the_engines_bit_for_bit(
    model: str, ranks: list[dict[str, Any]], folder: str, tmp_path: Path
) -> None:
    of_fsdp = read(f"{folder}/{model} state of fsdp", tmp_path / "fsdp")
    again = read(f"{folder}/{model} state of fsdp again", tmp_path / "again")
    assert of_fsdp.keys() == again.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in of_fsdp.items())
    engine = fsdp_engine(folder, model)
    asyncio.run(engine.load(f"{folder}/{model} float32 state 0"))
    asyncio.run(engine.save(str(tmp_path / "loaded")))
    loaded = read(str(tmp_path / "loaded"), tmp_path / "loaded.pt")
    written = read(f"{folder}/{model} float32 state 0", tmp_path / "first")
    assert all(torch.equal(loaded[key], tensor) for key, tensor in written.items())
    metrics = asyncio.run(engine.step(batches()[1])).metrics
    want = ranks[0][f"{model} float32"]["want"]
    assert metrics == pytest.approx(want["metrics"], rel=1e-4, abs=1e-6)
    for name, tensor in engine.full_weights():
        torch.testing.assert_close(tensor, want["weights"][name], rtol=0, atol=1e-5)
    asyncio.run(engine.close())
