"""Keys that the chosen method does not read."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest

from millrace.config import Config
from millrace.config.explain import all_keys, check_unread, default_of, facts, section_of
from millrace.config.recipe import load
from millrace.config.section import ReadWith
from millrace.errors import ConfigError

ROWS = [(key, fact.choices_in(key.rpartition(".")[0])) for key, fact in facts(ReadWith)]
OTHER: dict[str, Any] = {
    "rollout.python": "python3",
    "rollout.session_kv_slots": 2,
    "critic.loss_fn_type": "huber",
    "algorithm.f_norm": "std",
    "algorithm.kl_penalty": "k3",
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.filter_groups.metric": "acc",
    "actor.kl_loss_type": "k2",
    "algorithm.gdpo_reward_keys": ["a"],
    "algorithm.gdpo_reward_weights": [1.0],
    "rollout.max_num_batched_tokens": 64,
    "rollout.quantization": "fp8",
    "trainer.megatron.recompute_granularity": "full",
    "trainer.megatron.recompute_method": "block",
    "trainer.megatron.recompute_modules": ["mlp"],
}
"""Values that are not the default. The other keys are switches or numbers."""
NEEDED: dict[str, dict[str, Any]] = {
    "distillation.task_loss_coef": {"distillation.use_task_rewards": False},
    "distillation.max_log_ratio": {"distillation.loss_mode": "forward_kl_topk"},
    "guard.max_quantization_gap": {"rollout.engine": "vllm"},
    "algorithm.gdpo_reward_weights": {"algorithm.gdpo_reward_keys": ["a"]},
    "trainer.megatron.sequence_parallel": {"trainer.megatron.tensor_model_parallel_size": 2},
    "trainer.megatron.overlap_param_gather": {"trainer.megatron.overlap_grad_reduce": True},
}
"""Keys without which a key has no other value."""
UNREAD = {
    "rollout.n": 2,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.adv_estimator": "rloo",
    "data.sampler": "mine:f",
}
"""Choices that read none of the keys."""


def config_of(keys: Mapping[str, Any]) -> Config:
    """Return the configuration with these dotted keys, without the checks between sections."""
    root: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        functools.reduce(lambda at, part: at.setdefault(part, {}), sections, root)[name] = value
    return Config.model_validate(root)


def other(key: str) -> Any:
    """Return a value of a key that is not its default."""
    default = default_of(key)
    if key in OTHER:
        return OTHER[key]
    if isinstance(default, bool):
        return not default
    return default + 1 if "megatron" in key else default / 2 or 1


@pytest.mark.parametrize(("key", "choices"), ROWS, ids=[key for key, _ in ROWS])
def test_a_key_is_refused_unless_a_choice_reads_it(key: str, choices: Any) -> None:
    assert {key} | {k for choice in choices for k in choice} <= {
        k for k, field in all_keys() if not section_of(field.annotation)
    }
    extra = NEEDED.get(key, {})
    default_reads = {"trainer.deterministic": True} if key == "rollout.session_kv_slots" else {}
    with pytest.raises(ConfigError, match=r"does not read it\. Fix: .*, or "):
        check_unread(config_of(extra | UNREAD | default_reads | {key: other(key)}).value_of)
    for choice in choices:
        longest = max(len(values) for values in choice.values())
        for i in range(longest):
            chosen = {k: values[min(i, len(values) - 1)] for k, values in choice.items()}
            if "algorithm.kl_ctrl.type" in chosen:
                chosen["algorithm.use_kl_in_reward"] = True
            if "megatron" in key:
                chosen["trainer.engine"] = "megatron"
            check_unread(config_of(extra | chosen | {key: other(key)}).value_of)


def test_the_keys_of_a_switch_stay_if_the_switch_is_set_to_false() -> None:
    keys = ["actor.kl_loss_coef=0.5"]
    (note,) = load("quickstart", keys, ["actor.use_kl_loss=false"]).notes
    assert note == "no effect: actor.kl_loss_coef with actor.use_kl_loss=false"
    with pytest.raises(ConfigError, match=r"actor\.use_kl_loss=false does not read it"):
        load("quickstart", keys)


def test_the_keys_of_vllm_stay_if_a_layer_chooses_torch() -> None:
    keys = ["rollout.gpu_memory_utilization=0.5", "rollout.max_num_batched_tokens=64"]
    (note,) = load("quickstart", keys, ["rollout.engine=torch"]).notes
    assert "rollout.gpu_memory_utilization" in note and "rollout.max_num_batched_tokens" in note
    with pytest.raises(ConfigError, match=r"(?s)gpu_memory.*\n.*max_num_batched_tokens = 64"):
        load("quickstart", keys)


AGENTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "max_tool_tokens": (5, {"program": "a.py:f"}, {"tools": "a.py"}),
    "max_parallel_calls": (5, {"command": "a"}, {"environment": "chase"}),
    "tool_deadline_s": (5.0, {"remote": True}, {"tool_config_path": "a.yaml"}),
    "port": (5, {"program": "a.py:f"}, {"command": "a"}),
    "env": (("A",), {"remote": True}, {"command": "a"}),
    "workers": (2, {"remote": True}, {"command": "a"}),
    "lease_s": (5.0, {"command": "a"}, {"remote": True}),
    "strict": (True, {"environment": "chase"}, {"program": "a.py:f"}),
    "train_models": (("a",), {"tools": "a.py"}, {"remote": True}),
    "sandbox": ("process", {"tools": "a.py"}, {"environment": "fill_in"}),
    "max_turns": (5, {}, {"environment": "chase"}),
    "retries": (5, {}, {"command": "a"}),
}


@pytest.mark.parametrize("key", AGENTS)
def test_keys_of_agents_need_a_player_that_reads_them(key: str) -> None:
    value, without, reads = AGENTS[key]
    ours = {f"agents.{name}": one for name, one in {**without, key: value}.items()}
    with pytest.raises(ConfigError, match=rf"agents\.{key} = .*does not read it\. Fix: agents\."):
        check_unread(config_of(ours).value_of)
    check_unread(config_of({f"agents.{n}": v for n, v in {**reads, key: value}.items()}).value_of)
