"""The train engine compared with plain training, at 1, 2 and 3 ranks and 2 copies of 2 ranks.

The tests also cover checkpoints, exports, supervised steps and faults.
"""

from __future__ import annotations

import asyncio
import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from millrace.config import Config, ModelShape, OptimConfig
from millrace.errors import CheckpointError, ConfigError, MillraceError, NotFinite
from millrace.models.model import load_model, write_shape
from millrace.ports import TrainBatch
from millrace.testing import TrainCase, check_sleeping_train_engine
from millrace.train import log_probs as logprob
from millrace.train.fsdp import engine as fsdp_train
from millrace.train.fsdp import sharding
from tests.sweeps import thorough
from tests.train import cases as train_cases
from tests.train.cases import CASES, LAYOUTS, close
from tests.train.forks import GROUP
from tests.train.plain import plain_log_probs, plain_run
from tests.train.samples import VOCAB, random_samples

pytestmark = pytest.mark.xdist_group(GROUP)


@pytest.fixture(scope="module")
def ranks(folder: str, request: pytest.FixtureRequest) -> Any:
    return train_cases.on_ranks(
        folder,
        train_cases.CASES,
        train_cases.run_case,
        {"2": train_cases.run_extra, "2 x 2": train_cases.run_copies},
        thorough(request.config),
    )


@pytest.fixture(scope="module")
def plain(folder: str) -> Any:
    return {name: plain_run(case, folder) for name, case in CASES.items()}


@pytest.mark.parametrize(("name", "layout"), train_cases.points(CASES))
def test_training_is_that_of_a_plain_loop_at_any_number_of_ranks(
    name: str, layout: Any, folder: str, ranks: Any, plain: Any
) -> None:
    got = train_cases.run_case(CASES[name], folder, 0) if layout == "1" else ranks[layout][0][name]
    weights, results = plain[name]
    for metrics, (loss, norm, lr) in zip(got["metrics"], results, strict=True):
        assert metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-6, abs=1e-8)
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-6, abs=1e-8)
        assert metrics["actor/lr"] == pytest.approx(lr)
        assert all(np.isfinite(value) for value in metrics.values())
        assert metrics.get("actor/router_moved", 1.0) > 0 or "balance" in name
    assert got["weights"].keys() == weights.keys()
    for key, weight in weights.items():
        close(got["weights"][key], weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_every_rank_reports_the_same(layout: str, ranks: Any, folder: str) -> None:
    for name in ranks[layout][0].keys() & CASES.keys():
        for rank in ranks[layout][1:]:
            assert rank[name]["metrics"] == ranks[layout][0][name]["metrics"]
            assert rank[name]["log_probs"] == ranks[layout][0][name]["log_probs"]


def test_log_probs_are_those_of_a_plain_forward_pass_by_trajectory(folder: str, ranks: Any) -> None:
    case = CASES["many micro-batches"]
    model = train_cases.model_of(case, folder)
    want = []
    with torch.no_grad():
        for sample in train_cases.batches_of(case)[0].samples:
            for trajectory in sample.trajectories:
                want.append(
                    [float(row[0]) for row in plain_log_probs(model, sample, trajectory, 0.8)]
                )
    engine = train_cases.engine_of(case, folder, 0)
    alone = asyncio.run(engine.log_probs(train_cases.batches_of(case)[0].samples))
    for got in (
        alone,
        ranks["2"][0]["many micro-batches"]["log_probs"],
        ranks["3"][2]["many micro-batches"]["log_probs"],
        ranks["1 of 4"][3]["many micro-batches"]["log_probs"],
    ):
        assert [len(row) for row in got] == [len(row) for row in want]
        for a, b in zip(got, want, strict=True):
            assert a == pytest.approx(b, rel=1e-6, abs=1e-6)


def test_metrics_of_the_sampler_are_those_of_the_log_probs(folder: str) -> None:
    case = CASES["one micro-batch"]
    batch = TrainBatch(train_cases.batches_of(case)[0].samples[:4], 0)
    engine = train_cases.engine_of(case, folder, 0)
    current = np.concatenate(asyncio.run(engine.log_probs(batch.samples)))
    rollout = np.concatenate(
        [
            s.log_probs
            for x in batch.samples
            for t in x.trajectories
            for s in t.segments
            if s.log_probs
        ]
    )
    report = asyncio.run(engine.step(batch))
    metrics = report.metrics | report.totals
    delta, diff = rollout - current, np.abs(np.exp(rollout) - np.exp(current))
    ratio = np.exp(-delta)
    assert metrics["actor/kl_to_sampler"] == pytest.approx(delta.mean(), rel=1e-4)
    assert metrics["actor/ppo_kl"] == pytest.approx(delta.mean(), rel=1e-4)
    assert metrics["actor/k3_to_sampler"] == pytest.approx(
        np.minimum(ratio - 1 + delta, 10).mean(), rel=1e-4
    )
    assert metrics["actor/rollout_probs_diff_mean"] == pytest.approx(diff.mean(), rel=1e-4)
    assert metrics["actor/rollout_probs_diff_max"] == pytest.approx(diff.max(), rel=1e-4)
    lengths = [len(s.prompt.tokens) + t.num_tokens for s in batch.samples for t in s.trajectories]
    assert metrics["train/tokens"] == sum(lengths)
    equal = [len({t.score.value for t in s.trajectories}) == 1 for s in batch.samples]
    assert metrics["train/zero_advantage_share"] == pytest.approx(np.mean(equal))


@pytest.mark.parametrize("layout", ["2", "2 x 2"])
def test_weights_that_the_first_rank_loads_are_those_of_all(
    layout: str, folder: str, ranks: Any
) -> None:
    model = load_model(f"{folder}/tied", seed=0, dtype="float32")
    alone = train_cases.run_loaded(folder, 0, "1")["metrics"]
    for rank in ranks[layout]:
        loaded = rank["extra"]["loaded"]
        for name, parameter in model.named_parameters():
            close(loaded["weights"][name], parameter.detach(), rtol=0, atol=0)
        for buffers in loaded["buffers"]:
            assert len(buffers) == len(dict(model.named_buffers())) > 0
            for name, buffer in model.named_buffers():
                close(
                    next(b for n, b in buffers.items() if n.endswith(name.removeprefix("model."))),
                    buffer,
                    rtol=0,
                    atol=0,
                )
        assert loaded["metrics"] == ranks[layout][0]["extra"]["loaded"]["metrics"]
        # The reference has the start weights, one step away from the policy.
        assert 0 < loaded["metrics"]["actor/kl_loss"] < 0.01
        assert np.isfinite(loaded["metrics"]["critic/vf_loss"])
        for key in ("actor/pg_loss", "actor/grad_norm", "critic/grad_norm", "critic/vf_loss"):
            assert loaded["metrics"][key] == pytest.approx(alone[key], rel=1e-4), key


def test_a_checkpoint_of_two_ranks_goes_on_at_one(folder: str, ranks: Any) -> None:
    extra = ranks["2"][0]["extra"]
    case = CASES["one micro-batch"]
    engine = train_cases.engine_of(case, folder, 0)
    asyncio.run(engine.load(f"{folder}/checkpoint"))
    assert engine.steps == 4  # two supervised steps, two mini-batches of which one is skipped
    for name, weight in engine.full_weights():
        close(weight, extra["exported"][name], rtol=0, atol=0)
    metrics = asyncio.run(engine.step(train_cases.batches_of(case)[0])).metrics
    assert metrics["actor/grad_norm"] == pytest.approx(extra["last"]["actor/grad_norm"], rel=1e-6)
    assert metrics["actor/lr"] == pytest.approx(extra["last"]["actor/lr"])
    for name, weight in engine.full_weights():
        close(weight, extra["weights"][name], rtol=1e-5, atol=1e-6)


def test_ranks_of_the_first_copy_send_the_rows_that_they_tell_and_others_none(
    folder: str, ranks: Any
) -> None:
    engine = train_cases.engine_of(CASES["one micro-batch"], folder, 0)
    asyncio.run(engine.load(f"{folder}/checkpoint"))
    for name, whole, _, _, weight in engine.shards():
        assert whole == weight.shape
        told = [rank["extra"]["rows"][name] for rank in ranks["2 x 2"]]
        for first, own in told[:2]:
            assert torch.equal(own, weight[first : first + len(own)])
        assert [len(own) for _, own in told[2:]] == [0, 0]
        assert sum(len(own) for _, own in told) == len(weight)


def test_copies_exchange_gradients_once_for_a_mini_batch(ranks: Any) -> None:
    for rank in ranks["2 x 2"]:
        # One exchange for each of the two layers, and one for the other weights.
        assert rank["extra"]["exchanged"] == {True: 3, False: 3}


def test_a_checkpoint_of_two_ranks_goes_on_at_two_copies_and_theirs_at_one(
    folder: str, ranks: Any
) -> None:
    extra, want = ranks["2 x 2"][0]["extra"], ranks["2"][0]["extra"]
    for rank in ranks["2 x 2"]:
        assert rank["extra"]["last"] == extra["last"]
        assert all(
            torch.equal(rank["extra"]["weights"][name], weight)
            for name, weight in extra["weights"].items()
        )
    assert extra["last"]["actor/grad_norm"] == pytest.approx(
        want["last"]["actor/grad_norm"], rel=1e-6
    )
    for name, weight in want["weights"].items():
        close(extra["weights"][name], weight, rtol=1e-5, atol=1e-6)
    engine = train_cases.engine_of(CASES["one micro-batch"], folder, 0)
    asyncio.run(engine.load(f"{folder}/checkpoint of copies"))
    for name, weight in engine.full_weights():
        close(weight, extra["weights"][name], rtol=0, atol=0)
    written = [
        sum(f.stat().st_size for f in Path(folder, name).glob("*.distcp"))
        for name in ("checkpoint", "checkpoint of copies")
    ]
    assert written[1] < 1.2 * written[0], "one copy is written"


def test_an_export_of_two_ranks_loads_in_transformers_with_the_same_logits(
    folder: str, ranks: Any
) -> None:
    extra = ranks["2"][0]["extra"]
    assert os.path.exists(f"{folder}/export/model.safetensors")
    model = train_cases.model_of({}, folder).float()
    model.load_state_dict(extra["exported"], strict=False)
    with torch.no_grad():
        want = model(torch.tensor([[1, 2, 3]])).logits[0]
    close(train_cases.logits_of(f"{folder}/export", [1, 2, 3]), want, rtol=1e-6, atol=1e-6)


def test_supervised_steps_are_the_same_on_two_ranks_and_a_bad_step_is_skipped_on_all(
    folder: str, ranks: Any
) -> None:
    engine = train_cases.engine_of(CASES["one micro-batch"], folder, 0)
    for two in ranks["2"][0]["extra"]["sft"]:
        one = asyncio.run(engine.sft_step(train_cases.demonstrations(5))).metrics
        assert one == pytest.approx(two, rel=1e-6)
    batch = train_cases.with_bad_log_prob(train_cases.batches_of(CASES["one micro-batch"])[0])
    before = {name: weight.clone() for name, weight in engine.full_weights()}
    report = asyncio.run(engine.step(batch))
    assert report.totals["actor/nonfinite_steps"] == 1.0
    bad = report.metrics
    assert all(np.isfinite(value) for value in bad.values())
    assert bad == pytest.approx(ranks["2"][0]["extra"]["bad"], rel=1e-5, abs=1e-8)
    # The other mini-batch changed the weights.
    assert any(not torch.equal(weight, before[name]) for name, weight in engine.full_weights())


# One rank, as a user builds it, in float32
# -----------------------------------------------------------------------------


def built(folder: str, optim: Any = None, horizon: Any = 60, **overrides: Any) -> Any:
    config = Config(trainer={"device": "cpu"}, **overrides)
    engine = fsdp_train.build(config, f"{folder}/tied", rank=0, world_size=1)
    engine.restart(optim or OptimConfig(lr=1e-2), horizon)
    return engine


def test_conformance(folder: str) -> None:
    async def make() -> Any:
        return built(folder, actor={"ppo_mini_batch_size": 4})

    asyncio.run(check_sleeping_train_engine(make, TrainCase(mini_batch_size=4, vocab_size=VOCAB)))


def test_three_bad_steps_in_a_row_end_the_run_and_two_do_not(folder: str) -> None:
    engine = built(folder)
    batch = TrainBatch(random_samples(0, [4]), 0)
    bad = train_cases.with_bad_log_prob(batch)
    before = {name: weight.clone() for name, weight in engine.full_weights()}
    for _ in range(2):
        asyncio.run(engine.step(bad))
    for name, weight in engine.full_weights():
        close(weight, before[name], rtol=0, atol=0)
    assert not engine.actor.optimizer.state, "nothing was written into the moments"
    assert asyncio.run(engine.step(batch)).totals["actor/nonfinite_steps"] == 0.0
    for _ in range(2):
        asyncio.run(engine.step(bad))
    with pytest.raises(NotFinite, match="3 optimizer steps in a row"):
        asyncio.run(engine.step(bad))


def test_supervised_steps_learn_a_small_set(folder: str) -> None:
    """Eight rows by heart: the first check of a new cluster."""
    engine = built(folder, OptimConfig(lr=2e-2, lr_warmup_steps=5, lr_scheduler_type="linear"), 240)
    examples = train_cases.demonstrations(8)
    losses = [asyncio.run(engine.sft_step(examples)).metrics["sft/loss"] for _ in range(240)]
    assert losses[0] > 2.0
    assert losses[-1] < 1e-3


def test_a_batch_of_any_size_and_shape_is_trained(folder: str) -> None:
    engine = built(folder)
    for counts in ([], [0], [1], [3, 0, 2]):
        report = asyncio.run(engine.step(TrainBatch(random_samples(2, counts), 0)))
        assert report.optimizer_steps == bool(counts)
        assert all(np.isfinite(value) for value in report.metrics.values())
    unscored = random_samples(2, [2])[0]
    unscored = replace(
        unscored, trajectories=tuple(replace(t, score=None) for t in unscored.trajectories)
    )
    with pytest.raises(MillraceError, match="no score"):
        asyncio.run(engine.step(TrainBatch((unscored,), 0)))


def test_gradient_checkpointing_and_bfloat16_train_the_same_policy(folder: str) -> None:
    batch = TrainBatch(random_samples(0, [4, 4]), 0)
    plain = asyncio.run(built(folder).step(batch)).metrics
    checkpointed = built(folder, model={"gradient_checkpointing": True})
    assert any(
        getattr(m, "gradient_checkpointing", False) and m.training
        for m in checkpointed.policy.modules()
    )
    assert asyncio.run(checkpointed.step(batch)).metrics == pytest.approx(plain, rel=1e-6)
    some = built(
        folder, model={"gradient_checkpointing": True, "gradient_checkpointing_share": 0.5}
    )
    assert [layer.gradient_checkpointing for layer in some.policy.layers()] == [True, False]
    assert asyncio.run(some.step(batch)).metrics == pytest.approx(plain, rel=1e-6)
    half = built(folder, model={"dtype": "bfloat16"})
    assert asyncio.run(half.step(batch)).metrics["actor/grad_norm"] == pytest.approx(
        plain["actor/grad_norm"], rel=0.05
    )
    assert {weight.dtype for _, weight in half.full_weights()} == {torch.bfloat16}
    assert {p.dtype for p in half.policy.parameters()} == {torch.float32}
    asyncio.run(half.close())
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_units_of_several_layers_train_the_same_policy(
    checkpointing: bool, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(unit: int) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(sharding, "UNIT", unit)
        keys = {"dtype": "bfloat16", "gradient_checkpointing": checkpointing}
        engine = built(folder, model=keys)
        for seed in (0, 1):
            asyncio.run(engine.step(TrainBatch(random_samples(seed, [4, 4]), seed)))
        found = dict(engine.full_weights())
        asyncio.run(engine.close())
        return found

    one, all_layers = trained(1), trained(1 << 25)
    assert all(torch.equal(one[name], tensor) for name, tensor in all_layers.items())


def test_a_unit_has_enough_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "UNIT", 100)
    layers: list[torch.nn.Module] = [torch.nn.Linear(n, 1) for n in (300, 49, 49, 49, 400, 9)]
    units = sharding._units(layers)
    assert [len(unit) for unit in units] == [1, 2, 2, 1]
    assert [layer for unit in units for layer in unit] == layers


@pytest.mark.slow
def test_a_compiled_and_checkpointed_layer_has_one_graph_for_all_batches_and_passes(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Separate graphs for forward pass and recomputation might not keep the same tensors.

    The graphs are split as Inductor splits them, but not lowered to C++. tests/gpu lowers them.
    """
    batches = [TrainBatch(random_samples(seed, [4, 2 + seed, 3]), 0) for seed in range(3)]
    limit = {
        "actor": {"ppo_max_token_len_per_gpu": 60},
        "rollout": {"max_prompt_length": 8, "max_response_length": 25},
    }
    plain = built(folder, model={"dtype": "bfloat16"}, **limit)
    want = [asyncio.run(plain.step(batch)).metrics["actor/grad_norm"] for batch in batches]
    asyncio.run(plain.close())
    split = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", split)
    model = {
        "dtype": "bfloat16",
        "compile": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_share": 0.5,
    }
    # The log-prob functions stay uncompiled, because their sizes vary.
    monkeypatch.setattr(logprob, "_compiled", lambda function: function)
    engine = built(folder, model=model, **limit)  # compiles the graphs of all passes
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)
    got = [asyncio.run(engine.step(batch)).metrics["actor/grad_norm"] for batch in batches]
    assert got == pytest.approx(want, rel=0.02)
    asyncio.run(engine.close())


def test_what_is_missing_is_said(folder: str, tmp_path: Path) -> None:
    config = Config(trainer={"device": "cpu"})
    engine = fsdp_train.build(config, f"{folder}/tied", rank=0, world_size=1)
    with pytest.raises(MillraceError, match="begin"):
        asyncio.run(engine.step(TrainBatch(random_samples(0, [2]), 0)))
    with pytest.raises(CheckpointError, match="begin"):
        asyncio.run(engine.save(str(tmp_path)))
    with pytest.raises(CheckpointError, match="metadata"):
        asyncio.run(built(folder).load(str(tmp_path)))


def test_models_with_other_heads_are_refused(folder: str) -> None:
    model = train_cases.model_of({}, folder)
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        fsdp_train.PackedPolicy(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_names_the_dtype_of_its_weights(folder: str, tmp_path: Path, dtype: str) -> None:
    engine = built(folder, model={"dtype": dtype})
    asyncio.run(engine.export(str(tmp_path)))
    asyncio.run(engine.close())
    model = AutoModelForCausalLM.from_pretrained(tmp_path)  # by the dtype of config.json
    assert model.dtype == getattr(torch, dtype)
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        assert weight.dtype == model.dtype
        assert torch.equal(weight, model.state_dict()[name])


def test_the_tokenizer_goes_along_with_an_export(folder: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_shape(source, ModelShape(hidden_size=32, num_hidden_layers=1), vocab_size=VOCAB)
    (source / "tokenizer.json").write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    engine = fsdp_train.build(Config(trainer={"device": "cpu"}), str(source), rank=0, world_size=1)
    asyncio.run(engine.export(str(tmp_path / "export")))
    assert (tmp_path / "export" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "export" / "additional_chat_templates" / "tool_use.jinja").is_file()


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_warm_up_has_rows_for_every_rank(folder: str, ranks: int) -> None:
    """A rank without rows reads one token, and torch compiles a graph for that size alone."""
    engine = built(folder)
    engine.actor.world_size, seen = ranks, list[tuple[int, int]]()
    real = engine.actor.micro_batches

    def micro_batches(rows: Any, members: Any) -> Any:
        for rank in range(ranks):
            engine.actor.data_rank = rank
            seen.extend((rank, len(micro.input_ids)) for micro, _ in real(rows, members))
        return iter(())

    engine.actor.micro_batches = micro_batches  # type: ignore[method-assign]
    engine.actor.warm_up()
    assert {rank for rank, _ in seen} == set(range(ranks))
    assert all(size > 1 for _, size in seen)
