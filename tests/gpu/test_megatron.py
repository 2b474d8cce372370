"""The Megatron engine on two GPUs over NCCL, with the cases of tests/train/megatron.

There is no shim. Each case has a deadline of its own, and a pair of processes that breaks is
replaced, so each test reports its own fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.models.model import load_model

pytest.importorskip("megatron.core")

from tests.train.megatron import cases, weight_cases
from tests.train.megatron.cases import CP, EP, OVERLAP, PP, SP, TP, Case
from tests.train.megatron.checks import Tolerance, check_half, check_like_plain
from tests.train.megatron.pair import RANKS, Pair
from tests.train.megatron.weight_cases import check_rows, check_same_state, check_whole, read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="two GPUs"),
    pytest.mark.xdist_group("megatron ranks"),
]
FLOAT32 = Tolerance(absolute=5e-5, norm=1e-4, metrics=1e-3)
"""Without TF32. A GPU adds up in another order in each kernel, and by atomics in another order in
each run. That is some 1e-6 of a log-prob, and AdamW divides small gradients by as small numbers."""
STATE = Tolerance(absolute=5e-5, metrics=1e-3)
"""Of a step after a load. The state is equal bit for bit, but atomics make no two steps equal."""
LIMIT_S = 30.0
SHAPES = {name: case for name, case in cases.CASES.items() if case.ranks == RANKS}
HALVES = {
    "TP2, sequence parallel": Case("qwen2", SP),
    "PP2": Case("llama", PP),
    "DP2, overlaps": Case("qwen2", OVERLAP),
    "CP2": Case("llama", CP),
    "EP2": Case("mixtral", EP),
    "TP2, recompute": Case("llama", TP | {"recompute_granularity": "full"}),
}
"""In bfloat16, where attention is torch's varlen kernel: heads have a multiple of 8 elements."""
WEIGHTS = (
    *("TP2, one KV head", "TP2, q and k norms", "PP2, tied", "DP2, distributed optimizer"),
    *("CP2", "EP2", "TP2, EP2"),
)
CHAINS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("qwen2", "float32"): [TP, PP, OVERLAP, CP, TP],
    ("mixtral", "float32"): [EP, PP, EP],
    ("qwen2", "bfloat16"): [OVERLAP, TP, OVERLAP],
}
"""Each shape loads the state that the one before it saved."""


@pytest.fixture(scope="module", autouse=True)
def exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("models"))
    cases.write_models(path)
    return path


@pytest.fixture(scope="module")
def pair(folder: str) -> Iterator[Pair]:
    made = Pair(folder, "cuda")
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(pair: Pair, folder: str) -> dict[str, Any]:
    """The results of the FSDP engine in float32 on one GPU, by model."""
    return {name: cases.run_plain(name, folder, "cuda") for name in cases.MODELS}


@pytest.fixture(scope="module")
def halves(folder: str) -> dict[str, Any]:
    """The results of the FSDP engine in bfloat16 on one GPU, by model."""
    models = {case.model for case in HALVES.values()}
    return {name: cases.run_half(Case(name, ranks=1), folder, 0, "cuda") for name in models}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_computes_and_trains_like_the_fsdp_engine(
    name: str, pair: Pair, plain: dict[str, Any], folder: str
) -> None:
    case = SHAPES[name]
    found = pair.run(cases.run_case, case, folder, device="cuda", limit_s=LIMIT_S)
    check_like_plain(found, plain[case.model], FLOAT32)


@pytest.mark.parametrize("name", HALVES)
def test_bfloat16_with_varlen_attention_is_as_exact_as_the_fsdp_engine(
    name: str, pair: Pair, plain: dict[str, Any], halves: dict[str, Any], folder: str
) -> None:
    case = HALVES[name]
    found = pair.run(cases.run_half, case, folder, device="cuda", limit_s=LIMIT_S)
    check_half(found, halves[case.model], plain[case.model])


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_rows_and_exports_are_bit_for_bit_those_of_the_folder(
    name: str, pair: Pair, folder: str
) -> None:
    model = weight_cases.CASES[name].model
    want = dict(load_model(f"{folder}/{model}", seed=0, dtype="float32").named_parameters())
    found = pair.run(weight_cases.run_case, name, folder, device="cuda", limit_s=LIMIT_S)
    check_whole(folder, name, found, want)
    check_rows(name, found, want)


@pytest.mark.parametrize(("model", "dtype"), CHAINS)
def test_a_state_goes_through_other_shapes_bit_for_bit(
    model: str, dtype: str, pair: Pair, folder: str, tmp_path: Path
) -> None:
    chain = CHAINS[model, dtype]
    rest: Any = {"device": "cuda", "limit_s": 2 * LIMIT_S}
    found = pair.run(weight_cases.run_states, folder, model, chain, dtype, **rest)
    first = read(f"{folder}/{model} {dtype} state 0", tmp_path / "first")
    check_same_state(first, read(found[0]["last"], tmp_path / "last"))
    near = STATE if dtype == "float32" else Tolerance(absolute=5e-3, metrics=0.03)
    for rank in found:
        got, want = rank["got"], rank["want"]
        assert got["metrics"] == pytest.approx(
            want["metrics"], rel=near.metrics, abs=near.metrics / 100
        )
        for name, tensor in want["weights"].items():
            torch.testing.assert_close(
                got["weights"][name], tensor, rtol=0, atol=near.absolute, msg=name
            )


def test_a_state_of_the_fsdp_engine_loads_in_another_shape(
    pair: Pair, folder: str, tmp_path: Path
) -> None:
    engine = weight_cases.fsdp_engine(folder, "qwen2", "cuda")
    asyncio.run(engine.step(cases.batches()[0]))
    asyncio.run(engine.save(f"{tmp_path}/fsdp"))
    asyncio.run(engine.close())
    keys: Any = {"device": "cuda", "limit_s": LIMIT_S}
    again = f"{tmp_path}/again"
    pair.run(weight_cases.run_again, folder, "qwen2", TP, f"{tmp_path}/fsdp", again, **keys)
    check_same_state(read(f"{tmp_path}/fsdp", tmp_path / "a"), read(again, tmp_path / "b"))
