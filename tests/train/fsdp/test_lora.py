"""Adapters compared with plain peft training, at 1, 2 and 3 ranks and 2 copies of 2 ranks.

Weights that leave the engine have the model's own names.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from millrace.config import OptimConfig
from millrace.errors import CheckpointError, ConfigError, MissingDependency
from millrace.models.model import load_model
from millrace.ports import TrainBatch
from millrace.train.fsdp import lora
from millrace.train.rows import rows_of_samples
from tests.sweeps import thorough
from tests.train import cases as train_cases
from tests.train.cases import HORIZON, LAYOUTS, OPTIM, close
from tests.train.forks import GROUP
from tests.train.fsdp import lora_cases
from tests.train.fsdp.lora_cases import ALPHA, CASES, RANK
from tests.train.plain import plain_run
from tests.train.samples import random_samples

pytestmark = pytest.mark.xdist_group(GROUP)


@pytest.fixture(scope="module")
def ranks(folder: str, request: pytest.FixtureRequest) -> Any:
    return train_cases.on_ranks(
        folder,
        lora_cases.CASES,
        lora_cases.run_case,
        {"2": lora_cases.run_extra, "2 x 2": lora_cases.run_copies},
        thorough(request.config),
    )


@pytest.fixture(scope="module")
def plain(folder: str) -> Any:
    """The model of peft after plain training, and the results of its batches, by case."""
    found = {}
    for name, case in CASES.items():
        model = lora_cases.plain_model(case, folder)
        found[name] = (model, plain_run(case, folder, model)[1])
    return found


@pytest.mark.parametrize(("name", "layout"), train_cases.points(CASES))
def test_training_is_that_of_peft_in_a_plain_loop_at_any_number_of_ranks(
    name: str, layout: Any, folder: str, ranks: Any, plain: Any
) -> None:
    case = CASES[name]
    got = lora_cases.run_case(case, folder, 0) if layout == "1" else ranks[layout][0][name]
    model, results = plain[name]
    for metrics, (loss, norm, lr) in zip(got["metrics"], results, strict=True):
        assert metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-6, abs=1e-8)
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-6, abs=1e-8)
        assert metrics["actor/lr"] == pytest.approx(lr)
    trained = {
        name.removeprefix("base_model.model.").replace(".lora_A.default.weight", ".weight.lora_A")
        .replace(".lora_B.default.weight", ".weight.lora_B"): p.detach()
        for name, p in model.named_parameters() if p.requires_grad
    }  # fmt: skip
    # 2 matrices (A and B) x 2 layers x 7 modules
    assert got["adapters"].keys() == trained.keys() and len(trained) == 2 * 2 * 7
    for key, tensor in trained.items():
        close(got["adapters"][key], tensor, rtol=1e-5, atol=1e-7)  # norms are computed in float32
    assert any(
        tensor.abs().max() > 1e-4
        for key, tensor in got["adapters"].items()
        if key.endswith("lora_B")
    )
    start = dict(lora_cases.loaded(case, folder).double().named_parameters())
    assert all(torch.equal(tensor, start[key]) for key, tensor in got["base"].items()), (
        "the base does not move"
    )
    assert list(got["base"]) == list(start)


@pytest.mark.parametrize("layout", ["2", "3", "2 x 2"])
def test_the_ranks_of_the_first_copy_send_their_rows_of_the_same_adapters(
    layout: str, ranks: Any
) -> None:
    world_size, size, _ = LAYOUTS[layout]
    for name in ranks[layout][0].keys() & CASES.keys():
        for rank in ranks[layout][1:]:
            assert rank[name]["metrics"] == ranks[layout][0][name]["metrics"]
        for key, tensor in ranks[layout][0][name]["adapters"].items():
            rows = [rank[name]["rows"][key] for rank in ranks[layout]]
            assert {shape for shape, *_ in rows} == {tuple(tensor.shape)}
            each = size or world_size
            for _, first, own in rows[:each]:
                assert torch.equal(own, tensor[first : first + len(own)])
            assert sum(len(own) for *_, own in rows[:each]) == len(tensor)
            assert not any(len(own) for *_, own in rows[each:]), "one copy sends"


def merged_by_hand(base: Any, adapters: Any) -> Any:
    return {
        name: w + ALPHA / RANK * adapters[f"{name}.lora_B"] @ adapters[f"{name}.lora_A"]
        if f"{name}.lora_A" in adapters
        else w
        for name, w in base.items()
    }


def test_whole_weights_are_the_base_and_what_adapters_add(ranks: Any) -> None:
    for layout in ranks.values():
        for rank in layout:
            for name in rank.keys() & CASES.keys():
                found = rank[name]
                for key, tensor in merged_by_hand(found["base"], found["adapters"]).items():
                    close(found["merged"][key], tensor.float(), rtol=1e-6, atol=1e-7)


def test_every_rank_starts_from_the_base_and_from_the_seeds_adapters(
    folder: str, ranks: Any
) -> None:
    model = load_model(f"{folder}/tied", seed=0, dtype="float32")
    alone = lora_cases.with_reference(folder)
    for rank in ranks["2"]:
        start = rank["extra"]["start"]
        for name, parameter in model.named_parameters():
            assert torch.equal(start["base"][name], parameter)
        for name, tensor in lora_cases.adapters_of(alone).items():
            assert torch.equal(start["adapters"][name], tensor)
            assert bool(tensor.any()) == name.endswith("lora_A")
    for (name, whole), (own, parameter) in zip(
        alone.full_weights(), model.named_parameters(), strict=True
    ):
        assert name == own and torch.equal(whole, parameter)
    other = lora_cases.with_reference(folder, trainer={"seed": 1})
    assert not torch.equal(*(next(e.adapters())[4] for e in (alone, other)))


def test_a_checkpoint_of_two_ranks_holds_adapters_and_goes_on_at_one(
    folder: str, ranks: Any
) -> None:
    extra = ranks["2"][0]["extra"]
    described = (Path(folder) / "checkpoint" / ".metadata").read_bytes()
    assert b"lora_A" in described and b"base_layer" not in described
    engine = lora_cases.with_reference(folder)
    asyncio.run(engine.load(f"{folder}/checkpoint"))
    for name, weight in engine.full_weights():
        close(weight, extra["exported"][name])
    metrics = asyncio.run(engine.step(train_cases.batches_of({})[1])).metrics
    for key in ("actor/grad_norm", "actor/kl_loss", "critic/grad_norm", "critic/vf_loss"):
        assert metrics[key] == pytest.approx(extra["last"][key], rel=1e-4), key
    for name, weight in engine.full_weights():
        close(weight, extra["weights"][name], rtol=1e-4, atol=1e-6)


def test_a_checkpoint_of_two_ranks_goes_on_at_two_copies_and_theirs_at_one(
    folder: str, ranks: Any
) -> None:
    want = ranks["2"][0]["extra"]
    engine = lora_cases.with_reference(folder)
    asyncio.run(engine.load(f"{folder}/checkpoint of copies"))
    for rank in ranks["2 x 2"]:
        extra = rank["extra"]
        assert extra["base"] == engine.base_sum != 0, "copies of the base count once"
        for key in ("actor/grad_norm", "actor/kl_loss", "critic/grad_norm", "critic/vf_loss"):
            assert extra["last"][key] == pytest.approx(want["last"][key], rel=1e-4), key
        for name, weight in want["weights"].items():
            close(extra["weights"][name], weight, rtol=1e-4, atol=1e-6)
        for name, tensor in lora_cases.adapters_of(engine).items():
            assert torch.equal(tensor, extra["adapters"][name])


def test_adapters_of_another_base_are_refused(folder: str, ranks: Any) -> None:
    engine = lora_cases.with_reference(folder, trainer={"seed": 1})
    with pytest.raises(
        CheckpointError,
        match=r"adapters of another base than the weights in .*tied\. Fix: the model\.path",
    ):
        asyncio.run(engine.load(f"{folder}/checkpoint"))


def test_an_export_loads_without_peft_and_has_the_logits_of_the_adapted_model(
    folder: str, ranks: Any
) -> None:
    extra = ranks["2"][0]["extra"]
    exported = load_file(f"{folder}/export/model.safetensors")
    for name, weight in merged_by_hand(extra["start"]["base"], extra["adapters"]).items():
        close(exported[name], weight, rtol=1e-6, atol=1e-7)
    assert any(
        not torch.equal(exported[name], weight) for name, weight in extra["start"]["base"].items()
    )
    engine = lora_cases.with_reference(folder)
    asyncio.run(engine.load(f"{folder}/checkpoint"))
    with torch.no_grad():
        engine.policy.model.set_attn_implementation("sdpa")
        want = engine.policy.model(torch.tensor([[1, 2, 3]])).logits[0]
    close(train_cases.logits_of(f"{folder}/export", [1, 2, 3]), want, rtol=1e-5, atol=1e-5)


# One rank, in float32
# --------------------------------------------------------------------------------------------------


def test_the_reference_is_the_policy_that_rl_starts_from_and_stays_it(folder: str) -> None:
    """The reference is not the base, because supervised steps come before RL."""
    engine = lora_cases.with_reference(folder)
    for _ in range(3):
        asyncio.run(engine.sft_step(train_cases.demonstrations(5)))
    engine.restart(OptimConfig(lr=1e-2), HORIZON)
    samples = train_cases.batches_of({})[0].samples
    temperature = engine.options.temperature
    rows = rows_of_samples(samples)
    at_start = engine.actor.tokens(rows, temperature=temperature)[0]
    with without_adapters(engine):
        assert (engine.actor.tokens(rows, temperature=temperature)[0] - at_start).abs().max() > 1e-3
    assert torch.equal(engine.reference.tokens(rows, temperature=temperature)[0], at_start)
    asyncio.run(engine.step(TrainBatch(samples, 0)))
    trained = lora_cases.adapters_of(engine)
    assert (engine.actor.tokens(rows, temperature=temperature)[0] - at_start).abs().max() > 1e-3
    assert torch.equal(engine.reference.tokens(rows, temperature=temperature)[0], at_start)
    assert all(
        torch.equal(tensor, trained[name])
        for name, tensor in lora_cases.adapters_of(engine).items()
    )


@contextmanager
def without_adapters(engine: Any) -> Iterator[Any]:
    """Set every B to 0 inside the context."""
    tensors = [own for name, *_, own in engine.adapters() if name.endswith("lora_B")]
    kept = [t.clone() for t in tensors]
    for t in tensors:
        t.zero_()
    yield
    for t, before in zip(tensors, kept, strict=True):
        t.copy_(before)


def test_the_critic_starts_from_the_adapted_policy(folder: str) -> None:
    engine = lora_cases.with_reference(folder)
    for _ in range(3):
        asyncio.run(engine.sft_step(train_cases.demonstrations(5)))
    engine.restart(OPTIM, HORIZON)
    merged = dict(engine.full_weights())
    for name, parameter in engine.critic.module.body.named_parameters():
        assert torch.equal(parameter, merged[f"model.{name}"]) and parameter.requires_grad


def test_gradient_checkpointing_and_bfloat16_train_the_same_adapters(folder: str) -> None:
    batch = TrainBatch(random_samples(0, [4, 4]), 0)
    plain = asyncio.run(lora_cases.with_reference(folder).step(batch)).metrics
    checkpointed = lora_cases.with_reference(
        folder, model={"lora_rank": RANK, "gradient_checkpointing": True}
    )
    assert asyncio.run(checkpointed.step(batch)).metrics == pytest.approx(plain, rel=1e-5)
    half = lora_cases.with_reference(folder, model={"lora_rank": RANK, "dtype": "bfloat16"})
    kinds = {p.requires_grad: p.dtype for p in half.policy.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    assert asyncio.run(half.step(batch)).metrics["actor/grad_norm"] == pytest.approx(
        plain["actor/grad_norm"], rel=0.1
    )
    assert {weight.dtype for _, weight in half.full_weights()} == {torch.bfloat16}
    assert {dtype for _, _, dtype, *_ in half.adapters()} == {torch.float32}
    asyncio.run(half.close())


def test_modules_that_are_named_alone_get_adapters(folder: str) -> None:
    engine = lora_cases.with_reference(
        folder, model={"lora_rank": 2, "target_modules": ["q_proj", "mlp.up_proj"]}
    )
    adapted = {
        name.split("layers.")[1].removesuffix(".weight.lora_A")
        for name, *_ in engine.adapters()
        if name.endswith("A")
    }
    assert adapted == {f"{i}.{m}" for i in range(2) for m in ("self_attn.q_proj", "mlp.up_proj")}


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "proj", "qkv"])
def test_a_name_of_no_linear_module_of_the_layers_is_refused_with_those_that_there_are(
    folder: str, name: str
) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"'{name}'; there are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
    ):
        lora_cases.with_reference(
            folder, model={"lora_rank": 2, "target_modules": ["q_proj", name]}
        )


def test_a_missing_peft_is_said_with_the_command_that_installs_it(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependency, match=r"pip install 'peft>=0\.17'"):
        model = load_model(f"{folder}/tied", seed=0, dtype="float32")
        lora.inject(model, lora_cases.config_of({}).model, seed=0)
