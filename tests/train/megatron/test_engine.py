"""The Megatron engine compared with the FSDP engine and with Hugging Face, over two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.sweeps import sweep, thorough
from tests.train.forks import GROUP, start_ranks

pytest.importorskip("megatron.core")

from tests.train.megatron import cases
from tests.train.megatron.cases import CASES, FAST, MODELS
from tests.train.megatron.checks import check_like_plain
from tests.train.mixtures import forced

pytestmark = pytest.mark.xdist_group(GROUP)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    path = str(tmp_path_factory.mktemp("models"))
    cases.write_models(path)
    return path


@pytest.fixture(scope="module")
def plain(folder: str) -> dict[str, Any]:
    """The results of the FSDP engine on one rank, by model."""
    return {name: cases.run_plain(name, folder) for name in MODELS}


@pytest.fixture(scope="module")
def ranks(
    folder: str, plain: dict[str, Any], request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    """The results of each rank, of two and of four ranks. Only the first two have both."""
    names = [name for name in CASES if name in FAST or thorough(request.config)]
    for size in (2, 4):
        start_ranks(cases.run_rank, (folder, size, names), size)
    found: list[dict[str, Any]] = [{} for _ in range(4)]
    for size in (2, 4):
        for rank in range(size):
            found[rank] |= torch.load(f"{folder}/results-{size}-{rank}.pt", weights_only=False)
    return found


@pytest.mark.parametrize("name", sweep(CASES, FAST.__contains__))
def test_a_shape_computes_and_trains_like_the_fsdp_engine(
    name: str, ranks: list[dict[str, Any]], plain: dict[str, Any]
) -> None:
    case = CASES[name]
    check_like_plain([rank[name] for rank in ranks[: case.ranks]], plain[case.model])


@pytest.mark.parametrize("model", MODELS)
def test_log_probs_are_those_of_hugging_face_row_by_row(
    model: str, folder: str, ranks: list[dict[str, Any]]
) -> None:
    (name, *_) = [n for n, case in CASES.items() if case.model == model]
    rows, _ = cases.gradient_case(model)
    hf = AutoModelForCausalLM.from_pretrained(f"{folder}/{model}", attn_implementation="eager")
    force = forced(hf) if rows.experts is not None else lambda _: None
    log_probs, entropies = torch.zeros(2, len(rows.versions), dtype=torch.float64)
    for start, length in zip(rows.starts, rows.lengths, strict=True):
        ids = torch.from_numpy(rows.tokens[start : start + length])
        force(None if rows.experts is None else rows.experts[start : start + length].tolist())
        with torch.no_grad():
            log_p = (hf(ids[None]).logits[0] / 0.8).double().log_softmax(-1)
        for at in range(1, length):
            if rows.trained[start + at]:
                own, token = log_p[at - 1], rows.order[start + at]
                log_probs[token], entropies[token] = own[ids[at]], -(own.exp() * own).sum()
    found = ranks[0][name]["tokens"]
    torch.testing.assert_close(found[0], log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1], entropies, rtol=0, atol=1e-5)


def test_a_shared_vocabulary_gives_the_results_of_a_whole_one(ranks: list[dict[str, Any]]) -> None:
    """With padded rows, a rank without rows, several chunks and a logit of -inf."""
    for rank in ranks[:2]:
        assert len(rank["heads"]) == 4
        assert max(rank["heads"].values()) < 4e-6


def test_a_bfloat16_engine_trains_the_float32_weights_of_the_folder(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks[:2]:
        mains, own = rank["mains"]
        assert mains == 0.0 < own


def test_weights_are_stale_after_a_step_until_they_are_gathered(
    ranks: list[dict[str, Any]],
) -> None:
    ran = CASES.keys() & ranks[0].keys()
    late = {name for name in ran if ranks[0][name]["late"]}
    assert late == {name for name in ran if "overlap_param_gather" in CASES[name].keys} != set()


def test_kernels_of_one_gpu_keep_their_order_under_sequence_parallelism(
    ranks: list[dict[str, Any]],
) -> None:
    assert ranks[0]["connections"] == "1"


def test_conformance(folder: str) -> None:
    start_ranks(cases.conform, (folder,), 1)
