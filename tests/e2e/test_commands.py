"""The commands on a user's own data: sft, train, eval and export.

The data has verl's columns or TRL's. Each command runs once, for all tests. The commands run in
this process, through `main`, with real workers. New processes would only import everything four
times more.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace.config import Config
from millrace.data.chat import Chat
from millrace.models.model import load_model
from millrace.train.fsdp import engine as fsdp_train
from tests.e2e import runs
from tests.e2e.runs import millrace

pytestmark = pytest.mark.xdist_group("commands")

TINY = """
name: tiny
mode: one_step_off
trainer: {deterministic: true, logger: []}
rollout: {n: 4, total_rollout_steps: 32, max_prompt_length: 16, max_response_length: 6, max_num_seqs: 64}
actor: {ppo_mini_batch_size: 8, ppo_max_token_len_per_gpu: 4096, optim: {lr: 1.0e-3}}
"""
VERL = """
def score(data_source, solution_str, ground_truth, extra_info):
    assert data_source == "adding" and ground_truth == str(extra_info["a"] + extra_info["b"]), (data_source, extra_info)
    right = float(solution_str == ground_truth)
    return {"score": right, "digits": float(solution_str.isdigit())}
"""
TRL = """
async def score(prompts, completions, answer, level, **columns):
    assert len(prompts) == len(completions) == len(answer) == len(level) and level[0] in (1, 2)
    assert prompts[0].endswith("=")
    return [float(said == right) for said, right in zip(completions, answer)]
"""


@dataclass
class Home:
    """The user's folder."""

    folder: Path
    recipe: str
    verl: list[str]
    trl: list[str]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Make a user's folder: 24 sums of digits, in verl's columns and in TRL's columns."""
    folder = tmp_path_factory.mktemp("home")
    dice = random.Random(0)
    pairs = dice.sample([(a, b) for a in range(1, 10) for b in range(10)], 24)
    verl = [
        {"data_source": "adding", "prompt": [{"role": "user", "content": f"{a}+{b}="}], "ability": "math",
         "reward_model": {"style": "rule", "ground_truth": str(a + b)}, "extra_info": {"a": a, "b": b}}
        for a, b in pairs
    ]  # fmt: skip
    trl = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "level": 1 + (a + b > 9)} for a, b in pairs
    ]
    for name, rows in (("verl", verl), ("trl", trl)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "rewards.py").write_text(VERL + TRL.replace("def score", "def columns"))
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in verl[:12]))
    return Home(
        folder,
        str(folder / "tiny.yaml"),
        [
            f"data.train_files=['{folder}/verl.jsonl']",
            f"data.val_files=['{folder}/val.jsonl']",
            f"reward.function={folder}/rewards.py:score",
        ],
        [
            f"data.train_files=['{folder}/trl.jsonl']",
            f"reward.function={folder}/rewards.py:columns",
        ],
    )


@pytest.fixture(scope="module")
def supervised(home: Home) -> dict[str, Any]:
    """Run `millrace sft` on the 24 rows, until the model knows most of them by heart."""
    steps = ["sft.steps=100", "sft.batch_size=24", f"trainer.run_dir={home.folder / 'sft'}"]
    return millrace("sft", home.recipe, *home.verl, *steps, "--json").json


@pytest.fixture(scope="module")
def trained(home: Home, supervised: dict[str, Any]) -> dict[str, Any]:
    """Run `millrace train` on verl's columns, from the supervised model."""
    more = [
        f"model.path={supervised['model']}",
        f"trainer.run_dir={home.folder / 'verl'}",
        "rollout.val_kwargs.n=2",
    ]
    return millrace("train", home.recipe, *home.verl, *more, "--json").json


def test_sft_learns_a_small_set_by_heart(supervised: dict[str, Any]) -> None:
    """The mean loss is below 0.35 nats per token, and the exported folder answers.

    Guessing costs more than 2 nats per token.
    """
    assert supervised.keys() == {"run_dir", "model", "steps", "loss", "seconds", "complete"}
    assert supervised["complete"] and supervised["steps"] == 100 and supervised["loss"] < 0.35
    tokenizer = AutoTokenizer.from_pretrained(supervised["model"])
    model = AutoModelForCausalLM.from_pretrained(supervised["model"], dtype=torch.float32)
    right = 0
    rows = [
        json.loads(line)
        for line in (Path(supervised["run_dir"]).parent / "verl.jsonl").read_text().splitlines()
    ]
    for row in rows:
        ids = tokenizer.apply_chat_template(  # type: ignore[call-overload]
            row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]  # type: ignore[index]
        said = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]  # type: ignore[arg-type, misc]
        right += Chat(tokenizer).decode(said.tolist()) == row["reward_model"]["ground_truth"]  # type: ignore[arg-type]
    assert right >= 20, f"{right} of {len(rows)}"


def test_train_reports_what_is_documented_and_the_users_reward_in_verls_signature(
    home: Home, trained: dict[str, Any]
) -> None:
    assert {
        "run_dir",
        "mode",
        "versions",
        "optimizer_steps",
        "samples_trained",
        "train_seconds",
        "val",
        "complete",
    } <= trained.keys()
    assert (
        trained["mode"],
        trained["versions"],
        trained["optimizer_steps"],
        trained["samples_trained"],
    ) == ("one_step_off", 4, 4, 32)
    assert (
        trained["complete"] is True
        and trained["train_seconds"] > 0
        and trained["run_dir"] == str(home.folder / "verl")
    )
    figures = ("mean@2", "best@2", "maj@2", "greedy")
    names = {f"val/adding/{part}{name}" for part in ("", "digits/") for name in figures}
    assert trained["val"].keys() == names == trained["val_before"].keys()
    assert (
        all(0 <= value <= 1 for value in trained["val"].values())
        and trained["val"]["val/adding/mean@2"] > 0.3
    )
    rows = runs.rows(home.folder / "verl")
    assert all(
        row["reward/mean"] > 0.3 and row["reward/digits/mean"] >= row["reward/mean"] for row in rows
    )
    found = millrace("ledger", trained["run_dir"], "--json").json
    assert (found["admitted"], found["trained"], found["lost"], found["trained_twice"]) == (
        32,
        32,
        0,
        0,
    )


def test_eval_of_the_checkpoint_reproduces_the_runs_final_values(
    home: Home, trained: dict[str, Any]
) -> None:
    """The values are equal bit for bit: same weights and random streams, in other processes."""
    same = [
        f"model.path={home.folder / 'sft' / 'sft'}",
        "rollout.val_kwargs.n=2",
        f"trainer.resume={trained['checkpoint']}",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home.folder)
        found = millrace("eval", home.recipe, *home.verl, *same, "--json").json
    assert found.keys() == {"run_dir", "version", "val", "samples", "complete"}
    assert found["version"] == 4 and found["val"] == trained["val"]


def test_an_exported_checkpoint_has_the_checkpoints_logits_in_transformers(
    home: Home, trained: dict[str, Any]
) -> None:
    folder = home.folder / "exported"
    found = millrace("export", trained["run_dir"], str(folder), "--json").json
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert found == {
        "model": str(folder),
        "version": 4,
        "dtype": "float32",
        "parameters": sum(p.numel() for p in model.parameters()),
        "complete": True,
        "notes": [],
    }
    checkpoint = Path(trained["checkpoint"])
    engine = fsdp_train.build(
        Config(trainer={"device": "cpu"}), str(checkpoint / "model"), rank=0, world_size=1
    )
    engine.restart(Config().actor.optim, 1)
    before = {name: tensor.clone() for name, tensor in engine.full_weights()}
    asyncio.run(engine.load(str(checkpoint / "engine")))
    plain = load_model(checkpoint / "model", seed=0, dtype="float32")
    plain.load_state_dict(dict(engine.full_weights()), strict=False)
    ids = AutoTokenizer.from_pretrained(folder).encode(
        "3+4=", add_special_tokens=False, return_tensors="pt"
    )
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert any((before[name] != tensor).any() for name, tensor in engine.full_weights()), (
        "a checkpoint is not what it began with"
    )


def test_rows_in_trls_columns_train_with_an_async_reward_function_in_trls_signature(
    home: Home, supervised: dict[str, Any]
) -> None:
    more = [
        f"model.path={supervised['model']}",
        f"trainer.run_dir={home.folder / 'trl'}",
        "rollout.total_rollout_steps=16",
    ]
    result = millrace("train", home.recipe, *home.trl, *more, "--json").json
    assert result["complete"] and result["samples_trained"] == 16 and result["val"] == {}
    assert len(runs.rows(home.folder / "trl")) == 2
