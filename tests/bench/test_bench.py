"""The bench commands: their counts are correct, and they run."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config

from millrace.config import Config, ModelConfig, ModelShape, recipe
from millrace.errors import ConfigError
from millrace.extras.bench.engines import train_flops
from millrace.extras.bench.modes import Arm, arms_of, bench_modes, check_size, remarks, table
from millrace.models.model import load_model, write_shape
from millrace.schedule.steady import counted
from millrace.train.fsdp import lora
from tests.e2e import runs
from tests.waiting import HANG_S
from tests.workers import workers_of


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("length", [1, 7, 40])
def test_flops_are_those_that_torch_counts(tmp_path: Path, tied: bool, length: int) -> None:
    """Flops equal torch's count, except for half of the attention.

    A causal mask leaves that half out. Eager attention computes it.
    """
    shape = ModelShape(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        tie_word_embeddings=tied,
    )
    write_shape(tmp_path, shape, vocab_size=50)
    model = load_model(tmp_path, seed=0, dtype="float32", attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None] % 50).logits.sum().backward()
    attention = 6 * 3 * 4 * 8 * length**2
    # The first layer's input needs only the embeddings' gradient. torch counts that gradient whole.
    assert train_flops(tmp_path, [length], ModelConfig()) + attention == counter.get_total_flops()
    assert train_flops(tmp_path, [length, length], ModelConfig()) == 2 * train_flops(
        tmp_path, [length], ModelConfig()
    )
    config = Config.model_validate({"model": {"lora_rank": 4}})
    model = lora.inject(model, config.model, seed=0)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None] % 50).logits.sum().backward()
    # Nothing below the first layer is trained. Its q, k, v and their adapters therefore compute no
    # gradient of their input.
    first = 2 * length * (32 * 8 * (4 + 2 * 2) + 4 * 32 * 3)
    assert (
        train_flops(tmp_path, [length], config.model) + attention
        == counter.get_total_flops() + first
    )


def test_flops_refuse_a_model_that_their_formula_does_not_fit(tmp_path: Path) -> None:
    GPT2Config(n_embd=8, n_layer=2, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"'gpt2': .* has no hidden_size, num_hidden_layers"):
        train_flops(tmp_path, [4], ModelConfig())


def test_arms_are_modes_by_splits_and_colocated_ones_take_all_devices() -> None:
    assert arms_of(["colocate_sync", "async_partial"], ["1+3", "2+2"]) == [
        Arm("colocate_sync", 4, 4),
        Arm("async_partial", 1, 3),
        Arm("async_partial", 2, 2),
    ]
    assert arms_of(["async_swap"], ["1+1"], ["async_swap", "colocate_sync"]) == [
        Arm("async_swap", 1, 1),
        Arm("async_swap", 1, 1, uniform=True),
        Arm("colocate_sync", 2, 2, uniform=True),
    ]
    with pytest.raises(ConfigError, match="--modes = 'fast'"):
        arms_of(["fast"], ["1+1"])
    assert arms_of(["colocate_sync"], ["1+0"]) == [Arm("colocate_sync", 1, 1)], "one device"
    for wrong in ("2", "0+2", "2+0", "1+x", "1+1+1"):
        with pytest.raises(ConfigError, match="--splits"):
            arms_of(["async_swap"], [wrong])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("colocate_sync", range(2, 9)),
        ("one_step_off", range(2, 8)),
        ("async_partial", range(4, 6)),
        ("stream_off_policy", range(1, 9)),
    ],
)
def test_versions_that_fill_or_drain_the_pipeline_are_in_no_rate(
    mode: str, expected: range
) -> None:
    layers = [{"async_training": {"staleness_threshold": 2.5}}, {"mode": mode}]
    schedule = recipe.parse(recipe.resolve(layers)).schedule  # type: ignore[arg-type]
    assert counted(9 * schedule.window, 2, schedule) == expected
    least = (expected.stop - 1) * schedule.window + schedule.capacity
    assert (
        counted(least, 2, schedule) == expected
    )  # the slots of a whole window are taken again during the last counted version
    assert counted(least - 1, 2, schedule) == range(expected.start, expected.stop - 1)


def test_a_run_without_a_version_to_count_is_refused_before_engines_start() -> None:
    overrides = [
        "mode=async_partial",
        "async_training.staleness_threshold=2.5",
        "async_training.trigger_parameter_sync_step=1",
    ]

    def check(size: str) -> None:
        c = recipe.load(runs.RECIPE, overrides, [size])
        end = c.end(1000)
        check_size(c.schedule, end, c.value_of(end[0]), "async_partial", 1)

    check("rollout.total_rollout_steps=256")
    with pytest.raises(ConfigError, match=r"rollout\.total_rollout_steps = 224.* Fix: 256 or more"):
        check("rollout.total_rollout_steps=224")
    with pytest.raises(
        ConfigError, match=r"trainer\.total_training_steps = 1: .* Fix: 256 or more"
    ):
        check("trainer.total_training_steps=1")


def test_prompts_that_are_left_out_do_not_count_before_engines_start(tmp_path: Path) -> None:
    """4 of 400 prompts are short enough."""
    rows = [{"prompt": "1" * (4 + 60 * (n >= 4)), "ground_truth": "1"} for n in range(400)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"data.train_files=[{tmp_path / 'rows.jsonl'}]",
        "data.filter_overlong_prompts=true",
        "rollout.max_prompt_length=16",
        "rollout.total_rollout_steps=0",
        "trainer.total_epochs=1",
        "reward.function=exact",
    ]
    arms, folder = [Arm("colocate_sync", 1, 1)], tmp_path / "runs"
    with pytest.raises(ConfigError, match=r"trainer\.total_epochs = 1: the run has 1 versions"):
        asyncio.run(
            bench_modes(
                runs.RECIPE, overrides, arms, folder, runs.progress(), [], skip=1, repeats=1
            )
        )
    assert not folder.exists()


def test_a_key_that_the_benchmark_sets_itself_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["sft.steps=5", "rollout.n=4", "trainer.total_training_steps=1"]
    arms = [Arm("colocate_sync", 1, 1)]
    progress = runs.progress()
    with progress, pytest.raises(ConfigError, match="total_training_steps"):
        work = bench_modes(runs.RECIPE, overrides, arms, tmp_path, progress, [], skip=1, repeats=1)
        asyncio.run(work)
    said = capsys.readouterr().err
    assert "sft.steps=5 has no effect" in said and "rollout.n" not in said


def test_what_a_mode_fixes_stays_whatever_is_overridden(tmp_path: Path) -> None:
    overrides = ["rollout.n=3", "async_training.staleness_threshold=4"]
    for mode, staleness in (
        ("colocate_sync", 0.0),
        ("stream_off_policy", 0.0),
        ("one_step_off", 1.0),
        ("async_partial", 4.0),
    ):
        config = recipe.load(runs.RECIPE, overrides, Arm(mode, 1, 1).overrides)
        assert (config.schedule.staleness_threshold, config.rollout.n) == (staleness, 3)


def test_bench_modes_runs_arms_in_turn_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "bench"
    workload = [
        "rollout.max_response_length=32",
        "rollout.drawn_lengths.enable=true",
        "rollout.drawn_lengths.median=6",
    ]
    size = [
        "rollout.total_rollout_steps=32",
        "actor.ppo_mini_batch_size=4",
        "rollout.n=4",
        "rollout.max_num_seqs=64",
    ]
    options = ["--modes", "colocate_sync,colocate_partial", "--splits", "1+0", "--repeats", "2"]
    options += ["--uniform", "colocate_sync", "--folder", str(folder), "--json"]
    done = runs.millrace("bench", "modes", str(runs.RECIPE), *workload, *size, *options)
    figures = done.json["runs"]
    arms = [f["arm"] for f in figures]
    names = ["colocate_sync on 1", "colocate_partial on 1", "colocate_sync on 1, uniform"]
    assert sorted(arms[:3]) == sorted(names) and arms[3:] == arms[:3]
    tokens = {f["arm"]: f["trained_tokens_per_s"] / f["samples_per_s"] for f in figures}
    assert tokens[names[2]] == pytest.approx(tokens[names[0]], rel=0.5), "the same work"
    for f in figures:
        assert f["samples_per_s"] > 0 and 0 < f["mfu_in_steps"] < 1 and f["alone_tokens_per_s"] > 0
        assert f["version_s"] >= f["step_s"] > 0
    rows = map(
        json.loads, (folder / "colocate_sync on 1-0" / "metrics.jsonl").read_text().splitlines()
    )
    each_once = [
        row["prompt_length/mean"] / row["response_length/mean"]
        for row in rows
        if "reward/mean" in row
    ]
    assert min(each_once) <= figures[0]["read_per_drawn"] <= max(each_once), (
        "nothing is interrupted: prompts alone are read"
    )
    assert not list(folder.rglob("manifest.json"))
    assert [
        json.loads(line) for line in (folder / "figures.jsonl").read_text().splitlines()
    ] == figures
    for f in figures:
        assert abs(f["stock_share"]) <= 1 and f["advice"]
        assert 0 < f["trained_responses_per_s"] < f["trained_tokens_per_s"], "without the prompts"
    synchronous = [f for f in figures if f["mode"] == "colocate_sync"]
    assert all(f["more_ready"] == f["more_running"] == 0 for f in synchronous)
    assert all(
        f["drawn_tokens_per_s"] == pytest.approx(f["trained_responses_per_s"], rel=0.05)
        for f in synchronous
    ), "what is drawn in a version is trained in it"
    lines = table(figures).splitlines()[2:]
    assert len(lines) == 3 and any(
        line.startswith("| colocate_sync on 1 |") and " 1.00 |" in line for line in lines
    )
    repeats = [figures[0] | {"gain": 0.1}, figures[0] | {"gain": None}]
    assert table(repeats).splitlines()[2].startswith("| "), "one repeat has no gain"
    again = runs.millrace("bench", "modes", str(runs.RECIPE), "--folder", str(folder))
    assert again.code == 2 and "already exists" in again.err


def test_a_stock_that_changes_is_a_warning_and_each_arm_has_its_advice_once() -> None:
    """The limit is 5 % of what was trained in the counted versions."""
    figures: list[dict[str, Any]] = [
        {"arm": "a", "stock_share": -0.06, "more_ready": -3, "advice": ["first"]},
        {"arm": "a", "stock_share": 0.05, "more_ready": 2, "advice": ["second"]},
        {"arm": "b", "stock_share": 0.2, "more_ready": 9, "advice": []},
        {"arm": "c"},
    ]
    warned, grown, advice = remarks(figures)
    assert warned.startswith("warning: a: ") and "by -3, -6% of" in warned
    assert "trained more samples than it drew" in warned
    assert grown.startswith("warning: b: ") and "trained fewer samples than it drew" in grown
    assert advice == "advice: a: second"


@pytest.mark.slow
def test_bench_modes_whose_worker_dies_tells_what_it_has(tmp_path: Path) -> None:
    folder, output = tmp_path / "bench", tmp_path / "output"
    size = ["rollout.total_rollout_steps=32", "actor.ppo_mini_batch_size=4", "rollout.n=4"]
    options = ["--modes", "async_partial", "--repeats", "1000", "--folder", str(folder), "--json"]
    process = runs.start_command("bench", "modes", str(runs.RECIPE), *size, *options, output=output)
    while process.poll() is None and not (folder / "figures.jsonl").exists():
        time.sleep(0.1)
    try:
        workers_of(process.pid)["rollout-0"].kill()
        assert process.wait(HANG_S) == 1, output.read_text()
    finally:
        process.terminate()
    lines = output.read_text().splitlines()
    (told,) = [json.loads(line) for line in lines if line.startswith("{")]
    assert told["runs"][0]["arm"] == "async_partial 1+1" and told["complete"] is False
    assert lines[-1].startswith("error: ") and "was killed by SIGKILL" in lines[-1]


def test_bench_sync_holds_the_sync_against_the_link(tmp_path: Path) -> None:
    done = runs.millrace(
        "bench",
        "sync",
        str(runs.RECIPE),
        f"trainer.run_dir={tmp_path / 'run'}",
        "--repeats",
        "2",
        "--json",
    )
    found = done.json
    assert found["transport"] == "gloo" and found["link_gb_per_s"] > 0
    assert [f["load"] for f in found["syncs"]] == ["idle", "idle", "busy", "busy"]
    assert all(
        f["bytes"] == found["bytes"] > 100_000 and f["transfer_s"] > 0 and f["pause_s"] > 0
        for f in found["syncs"]
    )
    assert 0 < found["idle"]["share_of_link"] < 1.5


def test_bench_train_counts_what_a_step_does(tmp_path: Path) -> None:
    size = [
        "trainer.n_gpus_per_node=2",
        "actor.ppo_max_token_len_per_gpu=256",
        f"trainer.run_dir={tmp_path / 'run'}",
    ]
    done = runs.millrace(
        "bench", "train", str(runs.RECIPE), *size, "--length", "60", "--steps", "2", "--json"
    )
    found = done.json
    assert found["tokens_per_step"] == 2 * 4 * 59 and len(found["steps_s"]) == 5
    per_step = train_flops(tmp_path / "run" / "model", [59] * 8, ModelConfig())
    assert found["model_tflops_per_device"] * 1e12 * 2 * found["step_s"] == pytest.approx(per_step)
    assert 0 < found["mfu"] < 1 and 0.05 < found["peak_memory_gib"] < 24
    long = runs.millrace("bench", "train", str(runs.RECIPE), *size, "--length", "300")
    assert long.code == 2 and "--length 256" in long.err
