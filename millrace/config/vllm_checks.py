"""Checks of rollout.engine=vllm: the arguments that users may set, and those that millrace sets."""

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
    "data_parallel_size": "rollout.n_gpus_per_node and rollout.nnodes, which give the replicas",
    "max_model_len": "rollout.max_prompt_length and rollout.max_response_length",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "enable_prefix_caching": "rollout.enable_prefix_caching",
    "enforce_eager": "rollout.enforce_eager",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enable_sleep_mode": "rollout.free_cache_engine",
    "enable_return_routed_experts": "model.router_replay",
}
"""Arguments of vLLM's AsyncEngineArgs that have a key in millrace, and that key.

Other parts of millrace read these keys too.
"""

OWN = {
    "skip_tokenizer_init": "millrace sends and receives tokens",
    "generation_config": "the model's own defaults would change the sampling",
    "load_format": "the first weights come from the trainer",
    "logprobs_mode": "training needs the log-probs of the distribution that was sampled",
    "weight_transfer_config": "millrace transfers the weights itself",
    "worker_extension_cls": "millrace transfers the weights itself",
    "moe_backend": "other kernels permute the weights of experts, which a sync overwrites in order",
    "scheduler_cls": "millrace's scheduler keeps log-probs until their response ends",
}
"""Arguments of AsyncEngineArgs that users cannot change, and the reason."""


HOST_PID = "MILLRACE_VLLM_HOST"
"""Environment variable of vLLM's processes: the process that started them. They end with it."""


def check_vllm(rollout: RolloutConfig, trainer: TrainerConfig) -> None:
    """Raise ConfigError at the first check that fails."""
    given = rollout.engine_kwargs
    if rollout.engine != "vllm":
        if given and rollout.engine == "torch":
            raise bad_value(
                "rollout.engine_kwargs",
                given,
                "engine=torch takes no arguments",
                "rollout.engine=vllm, or remove the key",
            )
        return
    if trainer.deterministic:
        raise bad_value(
            "trainer.deterministic",
            True,
            "vLLM's results depend on which requests share a batch, so the same seed does not give "
            "the same bits",
            "rollout.engine=torch, or trainer.deterministic=false",
        )
    for name, value in given.items():
        if name in SETTINGS:
            raise bad_value(
                f"rollout.engine_kwargs.{name}", value, "has a key of its own", SETTINGS[name]
            )
        if name in OWN:
            raise bad_value(
                f"rollout.engine_kwargs.{name}", value, f"is fixed: {OWN[name]}", "remove it"
            )
    overrides = given.get("hf_overrides", {})
    if not isinstance(overrides, dict):
        rule = "must be a mapping of settings of the model's config.json"
        raise bad_value(
            "rollout.engine_kwargs.hf_overrides",
            overrides,
            rule,
            "rollout.engine_kwargs.hf_overrides.KEY=VALUE",
        )
