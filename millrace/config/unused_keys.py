"""Keys that only some choices read. With another choice, a value other than the default is an error.

Clips are not in the table: most loss modes read them, and recipes inherit them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from millrace.config.explain import default_of, example, shown
from millrace.config.plugins import OWN
from millrace.errors import ConfigError, bad_value

Choice = dict[str, tuple[Any, ...]]
"""The values of each key with which another key is read. All of them are necessary."""

LOSS, CORRECTION = "actor.policy_loss", "algorithm.rollout_correction"
BY_STD: Choice = {"algorithm.adv_estimator": ("grpo", "grpo_passk", "gdpo")}
LEVELS = ("group", "batch")
SWITCHES = {
    "actor.use_kl_loss",
    "algorithm.filter_groups.enable",
    "algorithm.norm_adv_by_std_in_grpo",
    "algorithm.use_kl_in_reward",
    "rollout.engine",
    "trainer.engine",
}
"""If a layer sets one of these keys to another value, the keys that need it may stay.

A recipe for vLLM then runs on a CPU with rollout.engine=torch alone: its keys of vLLM change speed
and memory, and no results.
"""

ENGINES = {"rollout.engine": "rollout_engines", "trainer.engine": "train_engines"}
"""The group of the names in each key."""


def _loss(*modes: str) -> Choice:
    return {f"{LOSS}.loss_mode": modes}


def _estimator(*names: str) -> Choice:
    return {"algorithm.adv_estimator": names}


READ: tuple[tuple[str, str, tuple[Choice, ...]], ...] = (
    # section, keys, choices that read them
    (LOSS, "tau_pos tau_neg", (_loss("sapo"),)),
    (LOSS, "vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg", (_loss("vespo"),)),
    (LOSS, "clip_cov_ratio clip_cov_lb clip_cov_ub", (_loss("clip_cov"),)),
    (LOSS, "kl_cov_ratio ppo_kl_coef", (_loss("kl_cov"),)),
    (LOSS, "dppo_clip_c", (_loss("dppo_tv", "dppo_kl"),)),
    (LOSS, "dro_beta", (_loss("dro"),)),
    ("actor", "loss_scale_factor", ({"actor.loss_agg_mode": ("seq-mean-token-sum-norm",)},)),
    ("actor", "kl_loss_coef kl_loss_type", ({"actor.use_kl_loss": (True,)},)),
    ("critic", "cliprange_value loss_fn_type", (_estimator("gae"),)),
    ("critic", "huber_delta", (_estimator("gae") | {"critic.loss_fn_type": ("huber",)},)),
    ("algorithm", "f_norm", (_estimator("gpg"),)),
    ("algorithm", "norm_adv_by_std_in_grpo", (BY_STD, {"rollout.n": (1,)})),
    (
        "algorithm",
        "epsilon",
        (
            _estimator("gpg") | {"algorithm.f_norm": ("std",)},
            BY_STD | {"algorithm.norm_adv_by_std_in_grpo": (True,)},
        ),
    ),
    ("algorithm", "gamma", (_estimator("gae", "reinforce_plus_plus"),)),
    ("algorithm", "lam", (_estimator("gae"),)),
    ("algorithm", "gdpo_reward_keys gdpo_reward_weights", (_estimator("gdpo"),)),
    ("algorithm.reward_norm", "mean_leave1out", ({"algorithm.reward_norm.mean_level": LEVELS},)),
    ("algorithm.reward_norm", "std_unbiased eps", ({"algorithm.reward_norm.std_level": LEVELS},)),
    ("algorithm.adv_norm", "mean_leave1out", ({"algorithm.adv_norm.mean_level": LEVELS},)),
    ("algorithm.adv_norm", "std_unbiased eps", ({"algorithm.adv_norm.std_level": LEVELS},)),
    ("algorithm", "kl_penalty", ({"algorithm.use_kl_in_reward": (True,)},)),
    ("algorithm.kl_ctrl", "type kl_coef", ({"algorithm.use_kl_in_reward": (True,)},)),
    ("algorithm.kl_ctrl", "target_kl horizon", ({"algorithm.kl_ctrl.type": ("adaptive",)},)),
    (
        "algorithm.filter_groups",
        "metric max_num_gen_batches",
        ({"algorithm.filter_groups.enable": (True,)},),
    ),
    (
        CORRECTION,
        "rollout_is_threshold",
        ({f"{CORRECTION}.rollout_is": ("token", "sequence", "geometric")},),
    ),
    (
        "rollout",
        "gpu_memory_utilization enforce_eager enable_prefix_caching max_num_batched_tokens "
        "free_cache_engine",
        ({"rollout.engine": ("vllm",)},),
    ),
    (
        "trainer.megatron",
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
        "expert_model_parallel_size expert_tensor_parallel_size sequence_parallel "
        "use_distributed_optimizer overlap_grad_reduce overlap_param_gather recompute_granularity",
        ({"trainer.engine": ("megatron",)},),
    ),
    (
        "trainer.megatron",
        "recompute_method recompute_num_layers",
        (
            {"trainer.megatron.recompute_granularity": ("full",)},
            {
                "trainer.megatron.recompute_granularity": (None,),
                "model.gradient_checkpointing": (True,),
            },
        ),
    ),
    (
        "trainer.megatron",
        "recompute_modules",
        ({"trainer.megatron.recompute_granularity": ("selective",)},),
    ),
    (
        "rollout",
        "session_kv_slots",
        ({"rollout.engine": ("torch",), "trainer.deterministic": (False,)},),
    ),
)


def check_unread(value_of: Callable[[str], Any]) -> None:
    """Raise ConfigError for keys that the run would ignore. `value_of` is that of a Config.

    The error names all such keys. Recipes and overrides are checked. Checkpoints are not, because
    those of earlier versions may have such a key.
    """
    errors = []
    for key, rule, (other, values) in unread(value_of):
        fix = f"{other}={' or '.join(map(shown, values))}, or {example(key)}"
        errors.append(str(bad_value(key, value_of(key), rule, fix)))
    agents = value_of("agents")
    for name, players in agents.unread().items():
        reads = " or ".join(f"agents.{player}" for player in players)
        who = f"agents.{agents.agent_kind}" if agents.agent_kind else "an episode without an agent"
        key = f"agents.{name}"
        fix = f"{reads}, or {example(key)}"
        errors.append(str(bad_value(key, value_of(key), f"{who} does not read it", fix)))
    if errors:
        raise ConfigError("\n".join(errors))


def unread(
    value_of: Callable[[str], Any],
) -> Iterator[tuple[str, str, tuple[str, tuple[Any, ...]]]]:
    """Yield each key that the run would ignore, the reason, and a choice that reads it."""

    def unmet_of(choice: Choice) -> list[tuple[str, tuple[Any, ...]]]:
        unmet = [(key, values) for key, values in choice.items() if value_of(key) not in values]
        # An engine of another package may read each key.
        return [u for u in unmet if u[0] not in ENGINES or value_of(u[0]) in OWN[ENGINES[u[0]]]]

    for section, names, choices in READ:
        for key in (f"{section}.{name}" for name in names.split()):
            unmet = min(map(unmet_of, choices), key=len)  # the choice that needs the fewest changes
            if value_of(key) == default_of(key) or not unmet:
                continue
            other, _ = unmet[0]
            place, _, name = other.rpartition(".")
            if other in SWITCHES and name in value_of(place).model_fields_set:
                continue  # a layer sets the switch to false, or chooses the torch engine
            yield key, f"{other}={shown(value_of(other))} does not read it", unmet[0]
