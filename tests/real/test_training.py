"""The train engines on real weights, against transformers and a float64 reference.

The first optimizer update of each path of the policy's loss has the reference's loss, gradient norm
and log-probs after the step: packed, padded and one row at a time, on one and two ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from millrace.ports import TrainBatch
from millrace.train.fsdp.engine import build
from millrace.types import Sample
from tests.real import ranks as on_ranks
from tests.real.model import EXACT, Reference
from tests.real.ranks import MEGATRON, ROWS, arrange
from tests.real.step import (
    OPTIM,
    PATHS,
    TEMPERATURE,
    Update,
    check,
    config_of,
    distance,
    exact_model,
    first_update,
    trajectories_of,
)
from tests.train.forks import GROUP, start_ranks

pytestmark = pytest.mark.xdist_group(GROUP)

Updates = Callable[[str], Update]


def results(function: Any, out: Path, folder: Path, samples: tuple[Sample, ...]) -> list[Any]:
    """Return what `function` writes on each of two ranks."""
    start_ranks(function, (str(out), str(folder), samples), 2)
    return [torch.load(out / f"results-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def fsdp(
    smollm2: Path, samples: tuple[Sample, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Any]]:
    """The folder that two ranks of FSDP wrote to, and their results by path."""
    out = tmp_path_factory.mktemp("fsdp")
    return out, results(on_ranks.fsdp, out, smollm2, samples)


def alone(
    smollm2: Path, samples: tuple[Sample, ...], path: str, **sections: Any
) -> tuple[Any, on_ranks.Got]:
    """Return the FSDP engine of one rank, and its first update."""
    return on_ranks.run(config_of(path, **sections), str(smollm2), samples, 0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", ROWS)
def test_the_first_update_is_the_float64_references(
    path: str,
    rows: str,
    smollm2: Path,
    samples: tuple[Sample, ...],
    updates: Updates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrange(monkeypatch, rows)
    _, got = alone(smollm2, samples, path, **ROWS[rows])
    check(got, updates(path))
    assert (got[0]["train/pad_share"] > 0.1) == (rows == "padded")


@pytest.mark.parametrize("path", PATHS)
def test_two_ranks_make_the_first_update_of_the_reference(
    path: str, fsdp: tuple[Path, list[Any]], updates: Updates
) -> None:
    for rank in fsdp[1]:
        check(rank[path], updates(path))
        assert rank[path][0] == fsdp[1][0][path][0]


def test_log_probs_are_those_of_transformers_in_float32(
    reference: Reference, samples: tuple[Sample, ...], fsdp: tuple[Path, list[Any]]
) -> None:
    """The reference for updates is millrace's too. This one is transformers' alone."""
    want = []
    for tokens, places, _ in trajectories_of(samples):
        whole = reference.log_probs(tokens[:1], tokens[1:], TEMPERATURE)
        want.append([float(whole[place - 1]) for place in places])
    for rank in fsdp[1]:
        for _, before, _ in rank.values():
            assert distance(before, want) < EXACT


def test_megatron_makes_the_first_update_of_the_reference(
    smollm2: Path, samples: tuple[Sample, ...], updates: Updates, tmp_path: Path
) -> None:
    pytest.importorskip("megatron.core")
    found = results(on_ranks.megatron, tmp_path, smollm2, samples)
    for rank in found:
        for name, (path, _) in MEGATRON.items():
            check(rank[name], updates(path))


def test_an_export_of_two_ranks_is_the_model_after_the_step(
    reference: Reference, samples: tuple[Sample, ...], fsdp: tuple[Path, list[Any]]
) -> None:
    """transformers loads the folder without millrace, and computes the engine's log-probs."""
    out, (rank, _) = fsdp
    other = Reference(reference.folder)
    other.model = AutoModelForCausalLM.from_pretrained(out / "export", dtype=torch.float32).eval()
    check_exported(other, samples, rank["sequence"][2])
    # The greedy answers moved too, but a step of the wrong sign would give the same texts.
    assert set(dict(other.model.named_parameters())) == set(
        dict(reference.model.named_parameters())
    )


def check_exported(other: Reference, samples: tuple[Sample, ...], after: list[list[float]]) -> None:
    found = []
    for tokens, places, _ in trajectories_of(samples):
        whole = other.log_probs(tokens[:1], tokens[1:], TEMPERATURE)
        found.append([float(whole[place - 1]) for place in places])
    assert distance(found, after) < EXACT


def test_a_checkpoint_of_two_ranks_resumes_on_one_with_the_same_log_probs(
    smollm2: Path, samples: tuple[Sample, ...], fsdp: tuple[Path, list[Any]]
) -> None:
    """The second step is the one that a run without the interruption takes."""
    out, (rank, _) = fsdp
    straight, (_, _, after) = alone(smollm2, samples, "sequence")
    resumed: Any = build(config_of("sequence"), str(smollm2), rank=0, world_size=1)
    asyncio.run(resumed.begin("rl", 10))
    assert distance(asyncio.run(resumed.log_probs(samples)), after) > 100 * EXACT
    asyncio.run(resumed.load(str(out / "checkpoint")))
    assert resumed.steps == 1
    assert distance(asyncio.run(resumed.log_probs(samples)), rank["sequence"][2]) < EXACT
    one, other = (asyncio.run(e.step(TrainBatch(samples, 1))).metrics for e in (straight, resumed))
    for key in ("actor/pg_loss", "actor/grad_norm", "actor/lr"):
        assert other[key] == pytest.approx(one[key], rel=1e-3)
    ends = [asyncio.run(e.log_probs(samples)) for e in (straight, resumed)]
    assert distance(*ends) < EXACT
    assert distance(ends[0], after) > 100 * EXACT


LORA_OPTIM = OPTIM | {"lr": 1e-4, "eps": 1e-3}
LORA = {"model": {"lora_rank": 8, "lora_alpha": 16.0}, "actor": {"optim": LORA_OPTIM}}


def test_adapters_take_the_first_step_of_peft_and_are_merged_into_the_export(
    reference: Reference, smollm2: Path, samples: tuple[Sample, ...], tmp_path: Path
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # as the engine draws its adapters from trainer.seed + 1
        plain = Reference(reference.folder).model
        settings = LoraConfig(
            r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        adapted: Any = get_peft_model(plain, settings)
    exact = exact_model(reference, adapted.double())
    trained = {name: p for name, p in exact.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 30
    want = first_update(exact, samples, "rollout", trained, LORA_OPTIM)
    engine, got = alone(smollm2, samples, "rollout", **LORA)
    check(got, want)
    asyncio.run(engine.export(str(tmp_path / "export")))
    other = Reference(reference.folder)
    other.model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", dtype=torch.float32
    ).eval()
    check_exported(other, samples, got[2])
