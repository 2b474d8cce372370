"""The table of verl's keys: complete, without contradictions, and true to millrace's own keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.config import Config, recipe
from millrace.config.layers import expand, is_native
from millrace.config.verl.absent import ABSENT
from millrace.config.verl.joined import JOINED
from millrace.config.verl.kinds import PREFIX, Absent, Mapped
from millrace.config.verl.mapped import MAPPED, PATTERNS
from millrace.config.verl.needless import NEEDLESS
from millrace.config.verl.translate import Note, entry, translate
from millrace.errors import ConfigError

HERE = Path(__file__).parent
KEYS = (HERE / "keys.txt").read_text().split()
"""Every key of verl's PPO, one-step-off and fully-async configurations, of two versions of verl."""
SCRIPTS = sorted(path for path in HERE.glob("*.txt") if path.name != "keys.txt")
"""Overrides of launch scripts of verl, with other paths."""


def test_no_key_of_verl_is_without_a_kind() -> None:
    unknown = [
        key
        for key in KEYS
        if entry(key, is_native) is None and not is_native(key.removeprefix(PREFIX))
    ]
    assert len(KEYS) > 950 and not unknown


def test_every_entry_matches_a_key_of_verl_or_its_older_spelling() -> None:
    spelled = {key.removeprefix(PREFIX) for key in KEYS} | set(KEYS)
    names = [name for table in (MAPPED, ABSENT, NEEDLESS, JOINED) for name in table]
    assert len(names) == len(set(names))
    for name in names:
        added = "overlong_buffer" in name or name.endswith("max_resp_len")
        assert "*" in name or name in spelled or name in OLDER or added, name


OLDER = {
    "actor.optim.lr_decay_steps",
    "actor.optim.lr_decay_style",
    "critic.optim.lr_decay_steps",
    "trainer.fsdp_size",
    "trainer.resume",
}
"""Keys that the lists lack: those of verl's Megatron optimizer, and keys of millrace that take
values of verl's."""


def test_mapped_keys_lead_to_keys_of_millrace() -> None:
    for name, row in {**MAPPED, **PATTERNS}.items():
        assert is_native(row.to.replace("*", "x")), name


def settings_of(key: str, value: Any) -> tuple[dict[str, Any], list[Note]]:
    notes: list[Note] = []
    return expand([(key, value)], notes), notes


@pytest.mark.parametrize(
    ("theirs", "value", "ours"),
    [
        ("actor_rollout_ref.actor.grad_clip", 0.5, {"actor": {"optim": {"clip_grad": 0.5}}}),
        ("trainer.save_freq", -1, {"trainer": {"save_freq": 0}}),
        ("trainer.save_freq", 7, {"trainer": {"save_freq": 7}}),
        ("actor_rollout_ref.rollout.top_k", -1, {"rollout": {"top_k": 0}}),
        ("actor_rollout_ref.rollout.name", "hf", {"rollout": {"engine": "torch"}}),
        ("actor_rollout_ref.hybrid_engine", False, {"async_training": {"placement": "separate"}}),
        ("actor_rollout_ref.hybrid_engine", True, {"async_training": {"placement": "colocated"}}),
        ("trainer.logger", ["console", "wandb"], {"trainer": {"logger": []}}),
        ("trainer.logger", "tensorboard", {"trainer": {"logger": ["tensorboard"]}}),
        ("trainer.resume_mode", "disable", {"trainer": {"resume": "never"}}),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size", -1, {"trainer": {"fsdp_size": 0}}),
        ("trainer.experiment_name", "a b/c", {"name": "a-b-c"}),
        ("trainer.project_name", "DAPO", {"name": "DAPO"}),
        ("custom_reward_function.path", "r.py", {"reward": {"function": "r.py:compute_score"}}),
        (
            "actor_rollout_ref.actor.clip_ratio",
            0.3,
            {"actor": {"clip_ratio_low": 0.3, "clip_ratio_high": 0.3}},
        ),
        (
            "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space",
            4,
            {"rollout": {"engine_kwargs": {"swap_space": 4}}},
        ),
        ("actor_rollout_ref.rollout.enable_chunked_prefill", True, {}),
        (
            "actor_rollout_ref.rollout.enable_chunked_prefill",
            False,
            {"rollout": {"engine_kwargs": {"enable_chunked_prefill": False}}},
        ),
        ("actor_rollout_ref.rollout.nnodes", 0, {}),
        ("actor_rollout_ref.rollout.nnodes", 2, {"rollout": {"nnodes": 2}}),
        ("actor_rollout_ref.actor.use_dynamic_bsz", True, {}),
        ("trainer.v1.trainer_mode", "separate_async", {"mode": "async_partial"}),
        ("algorithm.rollout_correction.bypass_mode", False, BYPASS := {
            "async_training": {"use_rollout_log_probs": False}
        }),
        ("async_training.compute_prox_log_prob", True, BYPASS),
        ("actor_rollout_ref.rollout.multi_turn.enable", False, {}),
        ("reward_model.model.path", "m", {}),
        ("reward_model.enable", True, {}),
        ("rollout.nnodes", 2, {"rollout": {"nnodes": 2}}),
    ],
)  # fmt: skip
def test_a_setting_becomes_what_it_means(theirs: str, value: Any, ours: dict[str, Any]) -> None:
    tree, notes = settings_of(theirs, value)
    assert tree == ours
    same = (
        tree and (theirs.removeprefix(PREFIX), value) in translate([(theirs, value)], is_native)[0]
    )
    assert same or len(notes) == 1


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("actor_rollout_ref.rollout.name", "sglang", ["sglang", "rollout.name=vllm"]),
        ("actor_rollout_ref.rollout.multi_turn.enable", True, ["multi-turn"]),
        ("actor_rollout_ref.actor.strategy", "megatron", ["FSDP2", "fsdp2"]),
        ("actor_rollout_ref.actor.megatron.param_offload", True, ["Megatron"]),
        ("trainer.v1.trainer_mode", "other", ["sync, colocate_async, separate_async"]),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 2, ["sequence parallelism"]),
        ("trainer.resume_from_path", None, []),
    ],
)
def test_a_feature_that_is_missing_is_named(key: str, value: Any, parts: list[str]) -> None:
    if not parts:
        assert settings_of(key, value)[0] == {}
        return
    with pytest.raises(ConfigError) as caught:
        settings_of(key, value)
    assert all(part in str(caught.value) for part in [key, repr(value), "Fix:", *parts])


def test_one_error_names_all_keys_of_a_feature_and_all_features() -> None:
    with pytest.raises(ConfigError) as caught:
        expand(
            [
                ("actor_rollout_ref.actor.megatron.use_mbridge", True),
                ("trainer.default_hdfs_dir", "hdfs://a"),
                ("actor_rollout_ref.ref.megatron.param_offload", True),
            ],
            [],
        )
    first, second = str(caught.value).splitlines()
    assert "use_mbridge" in first and "ref.megatron" in first and "hdfs" in second


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_launch_script_resolves_but_for_absent_features(script: Path) -> None:
    overrides = script.read_text().splitlines()
    absent = []
    for item in overrides:
        try:
            recipe.override_layer([item], [])
        except ConfigError as error:
            absent.append(item)
            assert "millrace does not have" in str(error) and item.split("=")[0].lstrip("+") in str(
                error
            )
    features = ("megatron", "multi_turn", "ulysses", "override_config", "custom_cls", "optimizer")
    assert all(any(name in item for name in features) for item in absent), absent
    base = "fully_async" if script.stem.startswith("fully_async") else "one_step_off"
    config = recipe.load(
        f"verl/{base}_ppo_trainer", [item for item in overrides if item not in absent]
    )
    assert config.async_training.placement == "separate" and config.translated
    assert config.schedule.window > 0


def test_values_of_a_script_arrive() -> None:
    script = HERE / "fully_async_dapo_7b_64_64_mis.txt"
    overrides = [
        item
        for item in script.read_text().splitlines()
        if not ("ulysses" in item or "override_config" in item)
    ]
    c = recipe.load("verl/fully_async_ppo_trainer", overrides)
    assert (c.schedule.window, c.schedule.capacity) == (32 * 4 * 4, 768)
    assert c.actor.optim.lr_warmup_steps == 10 * 4  # ten local steps of four mini-batches
    assert c.actor.optim.clip_grad == 1.0 and c.reward.overlong_buffer.len == 4096
    assert not c.async_training.use_rollout_log_probs
    assert c.algorithm.rollout_correction.rollout_rs == "seq_mean_k1"
    assert (c.trainer.save_freq, c.trainer.test_freq, c.trainer.fsdp_size) == (0, 20, 8)
    assert c.rollout.devices == 64 and c.rollout.replicas == 16


def test_both_sides_of_the_hybrid_engine_have_the_same_devices() -> None:
    c = recipe.load(
        "verl/ppo_trainer", ["trainer.n_gpus_per_node=2", "data.train_files=task:copy?size=9"]
    )
    assert c.async_training.colocated and c.rollout.devices == c.trainer.ranks == 2


def test_removed_keys_of_hydra_are_refused_and_added_ones_are_set() -> None:
    assert recipe.load("quickstart", ["++rollout.n=3"]).rollout.n == 3
    with pytest.raises(ConfigError, match=r"rollout\.n=VALUE"):
        recipe.load("quickstart", ["~rollout.n"])


def test_resume_from_a_path_needs_the_path() -> None:
    key, mode = "trainer.resume_from_path", "trainer.resume_mode"
    ours, _ = translate([(mode, "resume_path"), (key, "a/b")], is_native)
    assert ours == [("trainer.resume", "a/b")]
    with pytest.raises(ConfigError, match="resume_from_path=FOLDER"):
        translate([(mode, "resume_path")], is_native)


def test_kinds_are_what_the_tables_say() -> None:
    assert isinstance(entry("actor_rollout_ref.actor.grad_clip", is_native), Mapped)
    assert isinstance(entry("actor.megatron.x", is_native), Absent)
    assert isinstance(entry("actor.use_dynamic_bsz", is_native), str)
    assert entry("rollout.n", is_native) is None and "rollout.n" in {
        key for key, _ in recipe.all_keys(Config)
    }


def test_a_reward_model_counts_if_it_is_enabled() -> None:
    path, enable = "reward_model.model.path", "reward_model.enable"
    assert translate([(path, "m"), (enable, True)], is_native)[0] == [("reward.model.path", "m")]
    assert translate([(path, "m"), (enable, False)], is_native)[0] == []


@pytest.mark.parametrize(
    "key", ["data.apply_chat_template_kwargs", "actor_rollout_ref.model.override_config"]
)
def test_a_named_value_of_a_mapping_is_a_setting_even_if_it_is_false(key: str) -> None:
    assert translate([(key, {})], is_native)[0] == []
    with pytest.raises(ConfigError, match="millrace does not have"):
        translate([(f"{key}.enable_thinking", False)], is_native)


@pytest.mark.parametrize(
    ("program", "bypass"), [("ppo", False), ("one_step_off_ppo", True), ("fully_async_ppo", True)]
)
def test_each_program_has_verls_default_of_the_old_policy(program: str, bypass: bool) -> None:
    config = recipe.load(f"verl/{program}_trainer")
    assert config.async_training.use_rollout_log_probs == bypass
