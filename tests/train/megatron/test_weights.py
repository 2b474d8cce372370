"""Tests of weights between Hugging Face folders and Megatron ranks, over two ranks, bit for bit."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.models.model import load_model
from tests.sweeps import sweep, thorough
from tests.train.forks import GROUP, start_ranks

pytest.importorskip("megatron.core")

from tests.train.megatron.cases import MODELS, batches
from tests.train.megatron.weight_cases import (
    CASES,
    CHAINS,
    FAST,
    SYNCS,
    bits,
    check_rows,
    check_same_state,
    check_whole,
    fsdp_engine,
    read,
    run_rank,
    write_models,
)

pytestmark = pytest.mark.xdist_group(GROUP)
FLOAT32, HALF = [f"{model} float32" for model in CHAINS], "qwen2 bfloat16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    path = str(tmp_path_factory.mktemp("models"))
    write_models(path)
    return path


@pytest.fixture(scope="module")
def ranks(folder: str, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    names = [name for name in (*CASES, HALF) if name in FAST or thorough(request.config)]
    start_ranks(run_rank, (folder, names), 3)
    return [torch.load(f"{folder}/weights-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def models(folder: str) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: dict(load_model(f"{folder}/{name}", seed=0, dtype="float32").named_parameters())
        for name in MODELS
    }


@pytest.mark.parametrize("name", sweep(CASES, FAST.__contains__))
def test_whole_weights_and_exports_are_bit_for_bit_those_of_the_folder(
    name: str, folder: str, ranks: list[dict[str, Any]], models: dict[str, Any]
) -> None:
    check_whole(folder, name, [rank[name] for rank in ranks], models[CASES[name].model])


@pytest.mark.parametrize("name", sweep(CASES, FAST.__contains__))
def test_the_rows_that_ranks_send_cover_every_tensor_once(
    name: str, ranks: list[dict[str, Any]], models: dict[str, Any]
) -> None:
    check_rows(name, [rank[name] for rank in ranks], models[CASES[name].model])


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


@pytest.mark.parametrize("chain", sweep([*FLOAT32, HALF], FLOAT32.__contains__))
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
    check_same_state(first, last)


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
