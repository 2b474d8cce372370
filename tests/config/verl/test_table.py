"""The table of verl's keys: complete, without contradictions, and true to millrace's own keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.config import Config, recipe
from millrace.config.layers import is_native, nest
from millrace.config.layers import settings_of as settings_of_overrides
from millrace.errors import ConfigError
from millrace.extras.verl.absent import ABSENT
from millrace.extras.verl.joined import JOINED
from millrace.extras.verl.kinds import PREFIX, Absent, Mapped
from millrace.extras.verl.mapped import MAPPED, PATTERNS
from millrace.extras.verl.needless import NEEDLESS
from millrace.extras.verl.translate import Note, entry, translate

HERE = Path(__file__).parent
KEYS = (HERE / "keys.txt").read_text().split()
"""Every key of verl's PPO, one-step-off and fully-async configurations, with each of its engines, and
of its older versions."""
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
        added = any(p in name for p in ("overlong", "max_resp_len", ".override_", ".megatron."))
        assert "*" in name or name in spelled or name in OLDER or added, name


OLDER = {
    "actor.checkpoint.contents",
    "actor.fsdp_config.mixed_precision.buffer_dtype",
    "actor.fsdp_config.mixed_precision.param_dtype",
    "actor.fsdp_config.mixed_precision.reduce_dtype",
    "algorithm.rollout_correction.rollout_rs_threshold_lower",
    "critic.checkpoint.contents",
    "critic.kl_ctrl.horizon",
    "critic.kl_ctrl.target_kl",
    "model_engine",
    "rollout.enable_sleep_mode",
    "rollout.engine_kwargs.vllm.max_model_len",
    "rollout.n_agent",
    "rollout.n_val",
    "rollout.swap_space",
    "rollout.val_temperature",
    "trainer.checkpoint.save_contents",
    "trainer.fsdp_size",
    "trainer.remove_previous_ckpt_in_save",
    "trainer.resume",
    "trainer.val_generations_to_log_to_wandb",
}
"""Keys that the list lacks: the choice of the engine, those of other versions of verl and of its
forks, and keys of millrace that take values of verl's."""


def test_mapped_keys_lead_to_keys_of_millrace() -> None:
    for name, row in {**MAPPED, **PATTERNS}.items():
        assert is_native(row.to.replace("*", "x")), name


def ours_of(*layers: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return all settings that the layers become."""
    return [setting for layer in translate(layers, is_native)[0] for setting in layer]


def settings_of(key: str, value: Any) -> tuple[dict[str, Any], list[Note]]:
    ours, notes = translate([[(key, value)]], is_native)
    return nest(ours[0]), notes


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
        ("trainer.logger", ["console", "wandb", "file"], {"trainer": {"logger": ["console", "wandb"]}}),
        ("trainer.logger", "tensorboard", {"trainer": {"logger": ["tensorboard"]}}),
        ("trainer.resume_mode", "disable", {"trainer": {"resume": "never"}}),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size", -1, {"trainer": {"fsdp_size": 0}}),
        ("trainer.experiment_name", "a b/c", {"name": "a-b-c"}),
        ("trainer.project_name", "DAPO", {"trainer": {"project_name": "DAPO"}}),
        ("custom_reward_function.path", "r.py", {"reward": {"function": "r.py:compute_score"}}),
        (
            "actor_rollout_ref.actor.clip_ratio",
            0.3,
            {"actor": {"clip_ratio_low": 0.3, "clip_ratio_high": 0.3}},
        ),
        ("rollout.engine_kwargs.vllm.swap_space", 4, {"rollout": {"engine_kwargs": {"swap_space": 4}}}),
        ("actor_rollout_ref.rollout.enable_chunked_prefill", True, {}),
        (
            "actor_rollout_ref.rollout.enable_chunked_prefill",
            False,
            {"rollout": {"engine_kwargs": {"enable_chunked_prefill": False}}},
        ),
        (
            "actor_rollout_ref.model.override_config.model_config.rope_theta",
            5,
            {"model": {"override_config": {"rope_theta": 5}}},
        ),
        ("actor_rollout_ref.model.override_config.attn_implementation", "eager", {}),
        ("actor_rollout_ref.rollout.nnodes", 0, {}),
        ("actor_rollout_ref.actor.use_dynamic_bsz", True, {}),
        ("actor_rollout_ref.actor.strategy", "megatron", {"trainer": {"engine": "megatron"}}),
        ("actor.megatron.context_parallel_size", 4, {"trainer": {"megatron": {"context_parallel_size": 4}}}),
        ("actor.megatron.use_mbridge", True, {}),
        ("actor_rollout_ref.actor.router_replay.mode", "R2", {"model": {"router_replay": "R2"}}),
        ("trainer.v1.trainer_mode", "separate_async", {"mode": "async_partial"}),
        ("algorithm.rollout_correction.bypass_mode", False, BYPASS := {"async_training": {"use_rollout_log_probs": False}}),
        ("async_training.compute_prox_log_prob", True, BYPASS),
        ("actor_rollout_ref.rollout.multi_turn.enable", False, {}),
        ("actor_rollout_ref.rollout.multi_turn.format", "qwen3_coder", {"agents": {"tool_format": "qwen"}}),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", 16, {"agents": {"max_turns": 16}}),
        ("actor_rollout_ref.rollout.multi_turn.max_parallel_calls", 1, {"agents": {"max_parallel_calls": 1}}),
        ("actor_rollout_ref.rollout.multi_turn.max_tool_response_length", 256, {"agents": {"max_tool_tokens": 256}}),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "t.yaml", {"agents": {"tool_config_path": "t.yaml"}}),
        ("actor_rollout_ref.rollout.multi_turn.function_tool_path", "t.py", {"agents": {"tools": "t.py"}}),
        ("actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side", "middle", {}),
        ("actor_rollout_ref.rollout.agent.default_agent_loop", "tool_agent", {}),
        ("reward_model.model.path", "m", {}),
        ("rollout.nnodes", 2, {"rollout": {"nnodes": 2}}),
        ("model_engine", "megatron", {"trainer": {"engine": "megatron"}}),
        ("model_engine", "dp", {"trainer": {"engine": "fsdp"}}),
        ("actor_rollout_ref.actor.megatron.router_replay.mode", "R3", {"model": {"router_replay": "R3"}}),
        ("actor_rollout_ref.actor.fsdp_config.grad_offload", True, {}),
        ("actor_rollout_ref.ref.param_offload", True, {}),
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype", "bf16", {"model": {"dtype": "bfloat16"}}),
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype", "fp32", {}),
        ("actor_rollout_ref.rollout.n_val", 4, {"rollout": {"val_kwargs": {"n": 4}}}),
        ("actor_rollout_ref.rollout.val_temperature", 0.6, {"rollout": {"val_kwargs": {"temperature": 0.6}}}),
        ("actor_rollout_ref.rollout.swap_space", 8, {}),
        ("actor_rollout_ref.rollout.enable_sleep_mode", False, {}),
        ("actor_rollout_ref.rollout.n_agent", 5, {"rollout": {"n": 5}}),
        ("actor_rollout_ref.actor.checkpoint.contents", ["model", "hf_model"], {}),
        ("trainer.remove_previous_ckpt_in_save", True, {"trainer": {"max_ckpt_to_keep": 1}}),
        ("trainer.remove_previous_ckpt_in_save", False, {}),
        ("trainer.max_actor_ckpt_to_keep", None, {"trainer": {"max_ckpt_to_keep": 1_000_000}}),
        ("trainer.max_actor_ckpt_to_keep", 0, {"trainer": {"max_ckpt_to_keep": 1_000_000}}),
        ("trainer.test_freq", False, {"trainer": {"test_freq": 0}}),
        ("actor_rollout_ref.model.lora_alpha", 0, {}),
        ("actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction", 1.0, {}),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn", True, {}),
    ],
)  # fmt: skip
def test_a_setting_becomes_what_it_means(theirs: str, value: Any, ours: dict[str, Any]) -> None:
    tree, notes = settings_of(theirs, value)
    assert tree == ours
    same = tree and (theirs.removeprefix(PREFIX), value) in ours_of([(theirs, value)])
    assert same or len(notes) == 1


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("actor_rollout_ref.rollout.name", "sglang", ["sglang", "rollout.name=vllm"]),
        ("actor_rollout_ref.rollout.multi_turn.interaction_config_path", "a", ["interactions"]),
        ("actor_rollout_ref.actor.strategy", "torchtitan", ["fsdp", "megatron"]),
        ("actor.megatron.virtual_pipeline_model_parallel_size", 2, ["pipeline stage"]),
        ("critic.megatron.param_offload", True, ["critics in Megatron"]),
        ("trainer.v1.trainer_mode", "other", ["sync, colocate_async, separate_async"]),
        ("actor_rollout_ref.ref.ulysses_sequence_parallel_size", 2, ["must be actor.ulysses"]),
        ("trainer.resume_from_path", None, []),
        ("model_engine", "veomni", ["veomni", "megatron", "fsdp2"]),
        ("actor_rollout_ref.actor.strategy", "automodel", ["automodel"]),
        ("actor_rollout_ref.actor.torchtitan.attn_type", "flex", ["train engines other"]),
        (
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype",
            "bf16",
            ["reduce_dtype"],
        ),
        (
            "actor_rollout_ref.actor.fsdp_config.params_offload",
            True,
            ["fsdp_config.param_offload", "--drop"],
        ),
        ("actor_rollout_ref.actor.entropy_coef", 0.01, ["no such key", "actor.entropy_coeff, or"]),
        ("sft.optim.lr", 0.01, ["no such key", "Fix: sft.lr, or"]),
        ("actor.adaptive_entropy.enabled", True, ["no such key", "leave it out"]),
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
        ours_of(
            [
                ("actor_rollout_ref.actor.megatron.dist_checkpointing_path", "a"),
                ("trainer.default_hdfs_dir", "hdfs://a"),
                ("actor_rollout_ref.actor.megatron.dist_checkpointing_prefix", "b"),
            ]
        )
    first, second = str(caught.value).splitlines()
    assert "checkpointing_path" in first and "checkpointing_prefix" in first and "hdfs" in second


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_launch_script_resolves_but_for_absent_features(script: Path) -> None:
    overrides = script.read_text().splitlines()
    settings = settings_of_overrides(overrides)
    rows = {key: entry(key, is_native) for key, _ in settings}
    left_out = {k for k, v in settings if isinstance(row := rows[k], Absent) and not row.allows(v)}
    absent = [item for item in overrides if item.split("=")[0].lstrip("+") in left_out]
    if absent:
        with pytest.raises(ConfigError, match="millrace does not have") as caught:
            ours_of(settings)
        assert all(
            row.feature in str(caught.value)
            for k, row in rows.items()
            if k in left_out and isinstance(row, Absent)
        )
    features = ("megatron", "multi_turn", "override_config", "custom_cls", "optimizer")
    assert all(any(name in item for name in features) for item in absent), absent
    base = "fully_async" if script.stem.startswith("fully_async") else "one_step_off"
    engine = ["actor_rollout_ref.actor.strategy=megatron"] if "megatron" in script.stem else []
    kept = [item for item in overrides if item not in absent]
    config = recipe.load(f"verl/{base}_ppo_trainer", kept + engine)
    assert config.async_training.placement == "separate" and config.translated
    assert config.schedule.window > 0


def test_values_of_a_script_arrive() -> None:
    script = HERE / "fully_async_dapo_7b_64_64_mis.txt"
    c = recipe.load("verl/fully_async_ppo_trainer", script.read_text().splitlines())
    assert (c.schedule.window, c.schedule.capacity) == (32 * 4 * 4, 768)
    assert c.actor.optim.lr_warmup_steps == 10 * 4  # ten local steps of four mini-batches
    assert c.actor.optim.clip_grad == 1.0 and c.reward.overlong_buffer.len == 4096
    assert not c.async_training.use_rollout_log_probs
    assert c.algorithm.rollout_correction.rollout_rs == "seq_mean_k1"
    assert (c.trainer.save_freq, c.trainer.test_freq, c.trainer.fsdp_size) == (0, 20, 8)
    assert c.rollout.devices == 64 and c.rollout.replicas == 16
    assert c.context_size == 4 and c.max_tokens == 4 * 65536


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
    assert ours_of([(mode, "resume_path"), (key, "a/b")]) == [("trainer.resume", "a/b")]
    with pytest.raises(ConfigError, match="resume_from_path=FOLDER"):
        ours_of([(mode, "resume_path")])


def test_kinds_are_what_the_tables_say() -> None:
    assert isinstance(entry("actor_rollout_ref.actor.grad_clip", is_native), Mapped)
    assert isinstance(entry("actor.megatron.x", is_native), Absent)
    assert isinstance(entry("actor.use_dynamic_bsz", is_native), str)
    assert entry("rollout.n", is_native) is None and "rollout.n" in {
        key for key, _ in recipe.all_keys(Config)
    }


def test_a_reward_model_counts_if_it_is_enabled() -> None:
    path, enable = "reward_model.model.path", "reward_model.enable"
    assert ours_of([(path, "m"), (enable, True)]) == [("reward.model.path", "m")]
    assert ours_of([(path, "m"), (enable, False)]) == []
    with pytest.raises(ConfigError, match=r"reward_model\.model\.path=MODEL"):
        ours_of([(enable, True)])


def test_a_named_value_of_a_mapping_is_a_setting_even_if_it_is_false() -> None:
    key = "data.apply_chat_template_kwargs"
    assert ours_of([(key, {})]) == []
    with pytest.raises(ConfigError, match="millrace does not have"):
        ours_of([(f"{key}.enable_thinking", False)])


@pytest.mark.parametrize(
    ("program", "bypass"), [("ppo", False), ("one_step_off_ppo", True), ("fully_async_ppo", True)]
)
def test_each_program_has_verls_default_of_the_old_policy(program: str, bypass: bool) -> None:
    config = recipe.load(f"verl/{program}_trainer")
    assert config.async_training.use_rollout_log_probs == bypass


FUNCTION, RS = "custom_reward_function", "algorithm.rollout_correction"
BYPASS_KEY, PROX = f"{RS}.bypass_mode", "async_training.compute_prox_log_prob"
OLD = "async_training.use_rollout_log_probs"


@pytest.mark.parametrize(
    ("below", "above", "ours"),
    [
        ({f"{FUNCTION}.path": "r.py"}, {f"{FUNCTION}.name": "f"}, {"reward.function": "r.py:f"}),
        ({f"{FUNCTION}.name": "f"}, {f"{FUNCTION}.path": "r.py"}, {"reward.function": "r.py:f"}),
        ({f"{FUNCTION}.path": "r.py"}, {f"{FUNCTION}.path": None}, {}),
        ({"trainer.resume_mode": "resume_path"}, {"trainer.resume_from_path": "a"}, {"trainer.resume": "a"}),
        ({"trainer.experiment_name": "a", "trainer.project_name": "b"}, {"trainer.experiment_name": None}, {"trainer.project_name": "b"}),
        ({"reward_model.model.path": "m"}, {"reward_model.enable": True}, {"reward.model.path": "m"}),
        ({"actor.clip_ratio_low": 0.1}, {"actor.clip_ratio": 0.3}, {"actor.clip_ratio_low": 0.3, "actor.clip_ratio_high": 0.3}),
        ({"actor.clip_ratio": 0.3}, {"actor.clip_ratio_low": 0.1}, {"actor.clip_ratio_low": 0.1, "actor.clip_ratio_high": 0.3}),
        ({f"{RS}.rollout_is_threshold": 5.0}, {f"{RS}.rollout_is_threshold": None}, {}),
        ({"reward.model.max_length": 9}, {"reward_model.max_length": None}, {}),
        ({"rollout.engine_kwargs.vllm.swap_space": 4}, {"rollout.engine_kwargs.vllm": None}, {}),
        ({"rollout.enable_chunked_prefill": False}, {"rollout.enable_chunked_prefill": True}, {}),
        ({"rollout.enable_chunked_prefill": False}, {"rollout.engine_kwargs.vllm": None}, {"rollout.engine_kwargs.enable_chunked_prefill": False}),
        ({"actor.optim.warmup_style": "cosine"}, {"actor.optim.warmup_style": None}, {}),
        ({"rollout.gpu_memory_utilization": 0.6}, {"rollout.standalone_gpu_memory_utilization": None}, {"rollout.gpu_memory_utilization": 0.6}),
        ({f"{RS}.loss_type": "reinforce"}, {f"{RS}.loss_type": "ppo_clip"}, {}),
        ({f"{RS}.loss_type": "reinforce"}, {BYPASS_KEY: False}, {"async_training.use_rollout_log_probs": False}),
        ({"trainer.max_ckpt_to_keep": 3}, {"trainer.max_actor_ckpt_to_keep": None}, {"trainer.max_ckpt_to_keep": 1_000_000}),
        ({BYPASS_KEY: True}, {PROX: True}, {"async_training.use_rollout_log_probs": False}),
        ({}, {"rollout.gpu_memory_utilization": 0.4, "rollout.standalone_gpu_memory_utilization": 0.7}, {"rollout.gpu_memory_utilization": 0.7}),
        ({}, {OLD: True, PROX: True}, {OLD: False}),
        ({OLD: True}, {PROX: True}, {OLD: False}),
        ({}, {OLD: True, PROX: False}, {OLD: True}),
        ({}, {OLD: False, PROX: False}, {OLD: False}),
        ({}, {"rollout.n_agent": 5, "rollout.n": 2}, {"rollout.n": 10}),
        ({"rollout.n": 8}, {"rollout.n_agent": 5}, {"rollout.n": 5}),
        ({}, {"actor.use_torch_compile": True, "model_engine": "megatron"}, {"trainer.engine": "megatron"}),
        ({}, {"actor.use_torch_compile": True}, {"model.compile": True}),
        ({}, {"model.lora_rank": 0, "model.lora_alpha": 32}, {"model.lora_rank": 0}),
        ({"model.lora_rank": 8}, {"model.lora_alpha": 16}, {"model.lora_rank": 8, "model.lora_alpha": 16}),
        ({}, {"actor.megatron.router_replay.mode": "R3", "rollout.enable_rollout_routing_replay": True}, {"model.router_replay": "R3"}),
        ({"rollout.multi_turn.tool_config_path": "t.yaml"}, {"rollout.multi_turn.enable": False}, {}),
        ({"rollout.multi_turn.enable": False}, {"data.function_tool_path": "t.py"}, {}),
        ({"rollout.multi_turn.enable": False, "data.function_tool_path": "t.py"}, {"rollout.multi_turn.enable": True}, {"agents.tools": "t.py"}),
    ],
)  # fmt: skip
def test_layers_are_read_together_and_the_last_one_wins(
    below: dict[str, Any], above: dict[str, Any], ours: dict[str, Any]
) -> None:
    assert dict(ours_of([*below.items()], [*above.items()])) == ours


@pytest.mark.parametrize(
    "settings",
    [
        {BYPASS_KEY: True, PROX: True},
        {"actor_rollout_ref.actor.use_rollout_log_probs": False, BYPASS_KEY: True},
        {"actor_rollout_ref.actor.optim.lr_scheduler_type": "linear", "actor.optim.warmup_style": "cosine"},
        {"actor_rollout_ref.rollout.n": 4, "rollout.n": 8},
        {"data.max_prompt_length": 4, "actor_rollout_ref.rollout.prompt_length": 8},
        {"actor.grad_clip": 1.0, "actor.optim.clip_grad": 2.0},
        {"trainer.experiment_name": "a", "name": "b"},
    ],
)  # fmt: skip
def test_two_keys_that_contradict_each_other_are_both_named(settings: dict[str, Any]) -> None:
    items = [*settings.items()]
    with pytest.raises(ConfigError, match="contradicts") as caught:
        ours_of(items)
    assert all(key in str(caught.value) and repr(v) in str(caught.value) for key, v in items)
    assert ours_of([items[0]], [items[1]])


def test_two_keys_that_agree_are_one_setting() -> None:
    settings = [("data.max_prompt_length", 8), ("rollout.prompt_length", 8)]
    assert set(ours_of(settings)) == {("rollout.max_prompt_length", 8)}


@pytest.mark.parametrize(
    ("key", "harmless", "harmful"),
    [
        ("reward.sandbox_fusion.url", None, "http://a"),
        ("reward.reward_kwargs", {}, {"a": 1}),
        ("reward_model.reward_kwargs.a", None, False),
        ("custom_reward_function.reward_kwargs.a", None, 0),
        ("reward.reward_kwargs.max_resp_len", 512, 100),
        ("actor_rollout_ref.ref.model.path", None, "other"),
        ("actor_rollout_ref.ref.model.lora_rank", 0, 8),
        ("trainer.v1.sampler.custom_sampler.path", None, "a.py"),
        ("trainer.v1.separate_async.num_warmup_batches", 1, 4),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype", "fp32", "bfloat16"),
        ("actor_rollout_ref.actor.fsdp_config.qat.enable", False, True),
        ("actor_rollout_ref.ref.router_replay.mode", "disabled", "R2"),
        ("rollout.enable_rollout_routing_replay", False, True),
        ("actor.megatron.override_transformer_config.moe_router_enable_expert_bias", False, True),
        ("actor.megatron.override_transformer_config.moe_aux_loss_coeff", 0.0, 0.1),
        ("actor_rollout_ref.actor.checkpoint.load_contents", ["extra", "model", "optimizer"], ["model"]),
        ("actor_rollout_ref.actor.optim.total_training_steps", -1, None),
        ("actor_rollout_ref.actor.optim.override_optimizer_config.fused", True, None),
        ("actor_rollout_ref.actor.optim.override_optimizer_config.amsgrad", False, True),
        ("actor_rollout_ref.actor.optim.override_optimizer_config.momentum", None, 0.9),
        ("actor_rollout_ref.rollout.do_sample", True, False),
        ("actor_rollout_ref.rollout.logprobs_mode", "processed_logprobs", "raw_logprobs"),
        ("actor_rollout_ref.rollout.max_model_len", 1024, 1000),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.max_model_len", 1024, 1000),
        ("critic.loss_agg_mode", "token-mean", "seq-mean-token-sum"),
        ("critic.ppo_mini_batch_size", 32, 8),
        ("critic.ppo_epochs", 1, 2),
        ("critic.model.override_config", {}, {"a": 1}),
        ("reward_model.model.override_config", {}, {"a": 1}),
        ("reward_model.reward_loop_class_name", None, "Mine"),
    ],
)  # fmt: skip
def test_what_changes_a_run_is_refused_and_its_default_is_accepted(
    key: str, harmless: Any, harmful: Any
) -> None:
    assert ours_of([(key, harmless)]) == []
    if harmful is None:
        return
    leaves = harmful.items() if isinstance(harmful, dict) else ()
    given = [(f"{key}.{name}", value) for name, value in leaves] or [(key, harmful)]
    with pytest.raises(ConfigError, match="Fix: ") as caught:
        ours_of(given)
    assert key in str(caught.value)


def test_keys_that_must_equal_another_key_are_compared_with_it() -> None:
    given = [("actor.loss_agg_mode", "seq-mean-token-sum"), ("data.max_response_length", 100)]
    same = [
        ("critic.loss_agg_mode", "seq-mean-token-sum"),
        ("reward.reward_kwargs.max_resp_len", 100),
    ]
    assert ours_of(given, same) == [given[0], ("rollout.max_response_length", 100)]


def test_the_length_of_a_schedule_counts_if_its_learning_rate_changes() -> None:
    optim = "actor_rollout_ref.actor.optim"
    steps = (f"{optim}.lr_decay_steps", 100)
    assert ours_of([steps, (f"{optim}.lr_decay_style", "constant")])
    with pytest.raises(ConfigError, match="lr_decay_steps = 100"):
        ours_of([(f"{optim}.lr_decay_style", "cosine")], [steps])


def test_the_least_learning_rate_becomes_a_share() -> None:
    optim = "actor_rollout_ref.actor.optim"
    floor, lr = (f"{optim}.min_lr", 1e-7), (f"{optim}.lr", 1e-6)
    shape = (f"{optim}.lr_decay_style", "cosine")
    assert dict(ours_of([floor, lr, shape]))["actor.optim.min_lr_ratio"] == pytest.approx(0.1)
    assert dict(ours_of([floor, lr])) == {"actor.optim.lr": 1e-6}
    with pytest.raises(ConfigError, match=r"optim\.min_lr = 1e-07"):
        ours_of([floor, shape])


def test_arguments_of_the_optimizer_with_keys_here_are_mapped() -> None:
    key = "actor_rollout_ref.actor.optim.override_optimizer_config"
    ours = {"actor.optim.betas": [0.9, 0.95], "actor.optim.eps": 1e-15}
    assert dict(ours_of([(f"{key}.betas", [0.9, 0.95]), (f"{key}.eps", 1e-15)])) == ours


def test_critic_warmup_counts_training_steps_as_verl_does() -> None:
    words = ["trainer.critic_warmup=3", "async_training.require_batches=2", "actor.ppo_epochs=2"]
    assert recipe.load("algorithms/ppo", words).critic_warmup_steps == (3 - 1) * 2 * 2
    window = recipe.load(
        "verl/ppo_trainer", ["trainer.critic_warmup=3", "trainer.n_gpus_per_node=1"]
    )
    assert window.critic_warmup_steps == (3 - 1) * 1024 // 256
    assert recipe.load("algorithms/ppo", ["trainer.critic_warmup=1"]).critic_warmup_steps == 0
