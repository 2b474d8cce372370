"""Keys of verl, and the keys of millrace that they mean."""

from __future__ import annotations

PREFIX = "actor_rollout_ref."
ALIASES = {
    "data.max_prompt_length": "rollout.max_prompt_length",
    "data.max_response_length": "rollout.max_response_length",
    "custom_reward_function.path": "reward.function",
    "actor.fsdp_config.fsdp_size": "trainer.fsdp_size",
    "actor.fsdp_config.offload_policy": "trainer.offload_policy",
    "trainer.default_local_dir": "trainer.run_dir",
    "trainer.resume_mode": "trainer.resume",
    "algorithm.rollout_correction.bypass_mode": "async_training.use_rollout_log_probs",
    "reward_model.overlong_buffer.enable": "reward.overlong_buffer.enable",
    "reward_model.overlong_buffer.len": "reward.overlong_buffer.len",
    "reward_model.overlong_buffer.penalty_factor": "reward.overlong_buffer.penalty_factor",
}
"""Keys of verl that mean the same as a key of millrace."""

FOREIGN = {
    "actor.clip_ratio": "actor.clip_ratio_low and actor.clip_ratio_high",
    "trainer.experiment_name": "name",
}
"""Keys of verl that have no equivalent, and the nearest keys of millrace."""
