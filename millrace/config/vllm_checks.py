"""Checks of rollout.engine=vllm: which arguments its engine takes, and which millrace sets."""

from __future__ import annotations

from millrace.config.rollout_keys import RolloutConfig
from millrace.config.trainer_keys import TrainerConfig
from millrace.errors import bad_value

SETTINGS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "trainer.seed",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "data_parallel_size": "rollout.n_gpus_per_node and rollout.nnodes, whose devices make the replicas",
    "max_model_len": "rollout.max_prompt_length and rollout.max_response_length",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "enable_prefix_caching": "rollout.enable_prefix_caching",
    "enforce_eager": "rollout.enforce_eager",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enable_sleep_mode": "rollout.free_cache_engine",
}
"""Arguments of vLLM's AsyncEngineArgs that have a key, which other parts read as well, and that
key."""

OWN = {
    "skip_tokenizer_init": "tokens go in and come out",
    "generation_config": "the model's own defaults would change how is sampled",
    "load_format": "the first weights come from the trainer",
    "logprobs_mode": "other log-probs are not those that were sampled from",
    "weight_transfer_config": "weights come by millrace's transfer",
    "worker_extension_cls": "weights come by millrace's transfer",
    "scheduler_cls": "millrace's keeps log-probs until their response ends",
}
"""Arguments that cannot be other than they are, and why."""


HOST_PID = "MILLRACE_VLLM_HOST"
"""Environment of vLLM's processes: who started them, and with whom they end."""


def check_vllm(rollout: RolloutConfig, trainer: TrainerConfig) -> None:
    """Raise ConfigError at the first check that fails."""
    given = rollout.engine_kwargs
    if rollout.engine != "vllm":
        if given:
            raise bad_value(
                "rollout.engine_kwargs",
                given,
                "engine=torch has none",
                "rollout.engine=vllm, or leave it out",
            )
        return
    if trainer.deterministic:
        raise bad_value(
            "trainer.deterministic",
            True,
            "vLLM's kernels depend on who shares a batch: the same seed does not give the same bits",
            "rollout.engine=torch, or trainer.deterministic=false",
        )
    for name, value in given.items():
        if name in SETTINGS:
            raise bad_value(
                f"rollout.engine_kwargs.{name}", value, "has a key of its own", SETTINGS[name]
            )
        if name in OWN:
            raise bad_value(
                f"rollout.engine_kwargs.{name}", value, f"is fixed: {OWN[name]}", "leave it out"
            )
    overrides = given.get("hf_overrides", {})
    if not isinstance(overrides, dict):
        rule = "is no mapping of settings of the model's config.json"
        raise bad_value(
            "rollout.engine_kwargs.hf_overrides",
            overrides,
            rule,
            "rollout.engine_kwargs.hf_overrides.KEY=VALUE",
        )


UNREAD = (
    "gpu_memory_utilization",
    "enforce_eager",
    "enable_prefix_caching",
    "max_num_batched_tokens",
    "free_cache_engine",
)
"""Keys of rollout that vLLM alone reads."""


def check_unread(rollout: RolloutConfig) -> None:
    """Raise ConfigError for a key that the torch engine would ignore.

    Recipes and overrides are checked. Checkpoints are not: those of earlier versions may have the key.
    """
    if rollout.engine == "vllm":
        return
    for name in UNREAD:
        value, default = getattr(rollout, name), type(rollout).model_fields[name].default
        if value != default:
            shown = str(default).lower() if isinstance(default, bool) else default
            rule = "engine=torch does not read it"
            fix = f"rollout.engine=vllm, or rollout.{name}={shown}"
            raise bad_value(f"rollout.{name}", value, rule, fix)
