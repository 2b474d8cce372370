"""`millrace import-verl`: from a launch script to a recipe that loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.config import recipe
from millrace.extras.verl.importing import import_layer

SCRIPT = """
python3 -m verl.experimental.fully_async_policy.fully_async_main \\
    data.train_files=train.parquet data.train_batch_size=0 \\
    data.max_prompt_length=$((2 * 8)) data.max_response_length=8 \\
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=3 async_training.require_batches=2 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 algorithm.adv_estimator=grpo \\
    trainer.save_freq=-1 trainer.experiment_name='${NAME}'
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace("'${NAME}'", '"${NAME}"'))
    return path


def test_the_recipe_is_what_the_script_says(
    run: Callable[..., Any], script: Path, tmp_path: Path
) -> None:
    code, out, _ = run("import-verl", str(script), "--set", "NAME=a b")
    assert code == 0
    mine = tmp_path / "my.yaml"
    mine.write_text(out)
    config = recipe.load(mine)
    direct = [
        word.replace("$((2 * 8))", "16")
        for word in SCRIPT.replace("$((2 * 8))", "16").replace("\\\n", " ").split()[3:-1]
    ]
    named = recipe.load("verl/fully_async_ppo_trainer", [*direct, "trainer.experiment_name=a-b"])
    assert config.model_dump() == named.model_dump()
    assert config.actor.optim.lr_warmup_steps == 6 and config.name == "a-b"
    assert "lr_warmup_steps: 6  # actor_rollout_ref.actor.optim.lr_warmup_steps=3" in out
    assert "#   actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4: batches are" in out


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ([], "--set NAME=VALUE"),
        (["--set", "NAME"], "--set NAME=VALUE"),
        (["--set", "NAMES=x"], "--set NAME=x"),
        (["--set", "4=x"], "--set GPUS=VALUE"),
        (["--set", "NAME=x", "--base", "nonsense"], "--base"),
    ],
)
def test_a_wrong_call_names_the_fix(
    run: Callable[..., Any], script: Path, options: list[str], fix: str
) -> None:
    code, out, err = run("import-verl", str(script), *options)
    assert code == 2 and fix in err and not out


def test_absent_features_are_refused_or_left_out_by_name(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace("'${NAME}'", "x actor_rollout_ref.actor.shuffle=True"))
    code, out, err = run("import-verl", str(path))
    assert code == 2 and "a shuffle of mini-batches" in err and "--drop" in err and not out
    code, out, err = run("import-verl", str(path), "--drop")
    assert code == 0 and "# left out:\n#   actor_rollout_ref.actor.shuffle=true\n" in out


def test_keys_that_the_algorithm_does_not_read_are_needless(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo data.train_files=a.parquet algorithm.adv_estimator=grpo "
        "actor_rollout_ref.rollout.n=4 algorithm.lam=0.95 critic.cliprange_value=0.2\n"
    )
    code, out, _ = run("import-verl", str(tmp_path / "run.sh"))
    assert code == 0
    assert "#   algorithm.lam=0.95: algorithm.adv_estimator=grpo does not read it" in out
    (tmp_path / "my.yaml").write_text(out)
    assert recipe.load(tmp_path / "my.yaml").algorithm.lam == 1.0


PLAIN = (
    "python3 -m verl.trainer.main_ppo data.train_files=a.parquet algorithm.adv_estimator=grpo "
    "actor_rollout_ref.rollout.n=4 actor_rollout_ref.model.path=m "
)


@pytest.mark.parametrize(
    ("name", "base", "engine"),
    [
        ("ppo_megatron_trainer", "ppo", "megatron"),
        ("fully_async_ppo_megatron_trainer.yaml", "fully_async_ppo", "megatron"),
        ("one_step_off_ppo_megatron_trainer", "one_step_off_ppo", "megatron"),
        ("transfer_queue_ppo_megatron_trainer", "ppo", "megatron"),
        ("transfer_queue_ppo_trainer", "ppo", "fsdp"),
        ("dapo_megatron_trainer.yaml", "ppo", "megatron"),
    ],
)
def test_the_configurations_of_verl_are_known(
    run: Callable[..., Any], tmp_path: Path, name: str, base: str, engine: str
) -> None:
    (tmp_path / "run.sh").write_text(f"{PLAIN} --config-path=config --config-name '{name}'\n")
    code, out, err = run("import-verl", str(tmp_path / "run.sh"))
    assert code == 0, err
    assert f"inherits: verl/{base}_trainer\n" in out and "#   --config-path=config: " in out
    assert ("engine: megatron  # model_engine=megatron" in out) == (engine == "megatron")
    (tmp_path / "my.yaml").write_text(out)
    assert recipe.load(tmp_path / "my.yaml").trainer.engine == engine


def test_unknown_keys_come_first_and_an_override_takes_the_place_of_the_scripts(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{PLAIN} retriever.topk=3 actor_rollout_ref.rollout.name=sglang ~a.b\n")
    code, out, err = run("import-verl", str(path), "--drop")
    assert code == 2 and "actor_rollout_ref.rollout.name = 'sglang'" in err and not out
    answer = ("--set", "actor_rollout_ref.rollout.name=vllm", "--set", "rollout.n=8")
    code, out, err = run("import-verl", str(path), "--drop", *answer)
    assert code == 0, err
    _, second, third, *_ = out.splitlines()
    assert (second, third) == ("# unknown to verl: decide about each:", "#   retriever.topk=3")
    assert "# left out:\n#   ~a.b=\n" in out and "n: 8" in out
    code, _, err = run("import-verl", str(path), *answer)
    assert code == 2 and "retriever.topk = 3" in err and "--drop" in err


def test_an_answer_may_be_an_override(run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{PLAIN} trainer.n_gpus_per_node=$(nvidia-smi -L | wc -l)\n")
    code, _, err = run("import-verl", str(path))
    assert code == 2 and "--set trainer.n_gpus_per_node=VALUE" in err
    code, out, err = run("import-verl", str(path), "--set", "trainer.n_gpus_per_node=4")
    assert code == 0 and "n_gpus_per_node: 4" in out, err
    answers = ("--set", "trainer.n_gpus_per_node=4", "--set", "model_engine=megatron")
    code, out, err = run("import-verl", str(path), *answers)
    assert code == 0 and "engine: megatron" in out, err


def test_no_value_leaves_its_comment(run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    words = "+foo.bar='1\nevil: 2' trainer.default_local_dir='a\nrollout: 3'"
    path.write_text(f"{PLAIN} {words}\n")
    code, out, err = run("import-verl", str(path), "--drop")
    assert code == 0 and "#   foo.bar=1 evil: 2\n" in out, err
    (tmp_path / "my.yaml").write_text(out)
    assert recipe.load(tmp_path / "my.yaml").trainer.run_dir == "a\nrollout: 3"


def test_a_file_that_the_script_reads_is_named(run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"source ./env.sh\n{PLAIN} trainer.nnodes=${{NODES:-1}}\n")
    code, out, err = run("import-verl", str(path))
    assert code == 0 and "not read: --set NAME=VALUE" in out and "#   source ./env.sh\n" in out, err


@pytest.mark.parametrize("given", ["model_engine=fsdp", "actor_rollout_ref.actor.strategy=fsdp2"])
def test_an_answer_wins_over_every_spelling_of_its_key(
    run: Callable[..., Any], tmp_path: Path, given: str
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{PLAIN.strip()} --config-name=ppo_megatron_trainer model_engine=megatron\n")
    code, out, err = run("import-verl", str(path), "--set", given)
    assert code == 0 and f"engine: fsdp  # {given}\n" in out and "megatron" not in out, err


def test_a_program_that_is_not_known_needs_a_base(run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(PLAIN.replace("verl.trainer.main_ppo", "recipe.spin.main_spin"))
    code, _, err = run("import-verl", str(path))
    assert code == 2 and "'recipe.spin.main_spin'" in err and "--base verl/ppo_trainer" in err
    code, out, _ = run("import-verl", str(path), "--base", "verl/ppo_trainer")
    assert code == 0 and "inherits: verl/ppo_trainer" in out


def test_the_environment_gives_folders(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "run.sh").write_text(PLAIN.replace("a.parquet", "$HOME/a.parquet"))
    code, out, err = run("import-verl", str(tmp_path / "run.sh"))
    assert code == 0 and "train_files: /home/me/a.parquet" in out, err


@pytest.mark.parametrize("name", ["mine", "ppo_trainer_megatron.yaml"])
def test_a_configuration_that_is_not_read_is_refused(
    run: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    (tmp_path / "run.sh").write_text(
        f"python3 -m verl.trainer.main_ppo --config-name='{name}' rollout.n=4\n"
    )
    code, _, err = run("import-verl", str(tmp_path / "run.sh"))
    assert code == 2 and name in err and "--base" in err


@pytest.mark.parametrize("text", ["", "echo hello\n", "python3 train.py --lr=1e-6\n"])
def test_a_script_without_overrides_is_refused(
    run: Callable[..., Any], tmp_path: Path, text: str
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    code, _, err = run("import-verl", str(path))
    assert code == 2 and "has no overrides" in err
    code, _, err = run("import-verl", str(tmp_path / "none.sh"))
    assert code == 2 and "No such file" in err


def test_config_name_takes_the_place_of_the_recipe(run: Callable[..., Any]) -> None:
    overrides = ["data.train_files=task:copy?size=64", "actor_rollout_ref.rollout.name=hf"]
    sizes = [
        "trainer.n_gpus_per_node=1",
        "rollout.n_gpus_per_node=1",
        "algorithm.adv_estimator=grpo",
    ]
    arguments = [*overrides, *sizes, "actor_rollout_ref.rollout.n=2", "--dry-run", "--json"]
    name = "--config-name=fully_async_ppo_trainer.yaml"
    first = run("train", "--config-path=config", name, *arguments)
    assert first[0] == 0, first[2]
    assert first[1] == run("train", "verl/fully_async_ppo_trainer", *arguments)[1]
    assert '"actor_rollout_ref.rollout.name=hf -> rollout.engine=torch"' in first[1]
    assert (
        "trainer.engine=megatron"
        in run("train", "--config-name=fully_async_ppo_megatron_trainer", *arguments)[1]
    )
    for option in ("--config-path=config", "--config-name=ppo_trainer_megatron"):
        code, _, err = run("train", option, *arguments)
        assert code == 2 and option.partition("=")[0] in err and "ppo_trainer" in err


def test_warm_ups_of_both_optimizers_are_counted_in_optimizer_steps() -> None:
    words = ["actor_rollout_ref.actor.optim.lr_warmup_steps=3", "critic.optim.lr_warmup_steps=2"]
    tree = import_layer("verl/ppo_trainer", [*words, "trainer.n_gpus_per_node=1"], drop=False).tree
    assert tree["actor"]["optim"]["lr_warmup_steps"] == 3 * 1024 // 256
    assert tree["critic"]["optim"]["lr_warmup_steps"] == 2 * 1024 // 256
