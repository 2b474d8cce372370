"""Tests of the pair of ranks that tests/gpu/test_megatron.py uses, with its cases, over gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.train.forks import GROUP
from tests.train.megatron import cases, weight_cases
from tests.train.megatron.cases import CP, PLAIN, PP, TP, Case
from tests.train.megatron.checks import check_half, check_like_plain
from tests.train.megatron.pair import Pair
from tests.waiting import HANG_S

pytestmark = pytest.mark.xdist_group(GROUP)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    path = str(tmp_path_factory.mktemp("models"))
    cases.write_models(path)
    return path


@pytest.fixture(scope="module")
def pair(folder: str) -> Iterator[Pair]:
    made = Pair(folder, "cpu")
    made.start()
    yield made
    made.close()


def test_the_cases_of_gpus_run_here_too(pair: Pair, folder: str) -> None:
    plain = cases.run_plain("llama", folder)
    for keys in (PP, CP | PLAIN):
        case = Case("llama", keys)
        found = pair.run(cases.run_case, case, folder, device="cpu", limit_s=HANG_S)
        check_like_plain(found, plain)
    half = cases.run_half(Case("llama", ranks=1), folder, 0)
    found = pair.run(cases.run_half, case, folder, device="cpu", limit_s=HANG_S)
    check_half(found, half, plain)
    args = (folder, "llama", [PP, TP, PP], "float32")
    for rank in pair.run(weight_cases.run_states, *args, device="cpu", limit_s=HANG_S):
        assert rank["got"]["metrics"] == rank["want"]["metrics"]
