"""TRL's names, for the error of a user who types one: the keys of millrace that mean the same.

The names are public fields of GRPOConfig in TRL 1.16, with those of transformers that users set
most, and arguments of GRPOTrainer. docs/from_trl.md has a row for each.
"""

from __future__ import annotations

_BATCH = "actor.ppo_mini_batch_size=VALUE, which counts prompts, and not completions"
_SYNC = "async_training.trigger_parameter_sync_step=VALUE: optimizer steps between two syncs"
_MODEL = "model.path"
_STEPS = "rollout.total_rollout_steps=VALUE, which counts prompts"
_WEIGHTS = (
    "algorithm.rollout_correction.rollout_is=token async_training.use_rollout_log_probs=false"
)
_ENGINE = "rollout.engine_kwargs.NAME=VALUE, an argument of vLLM"
_FULL = "none: training needs the log-probs of the full distribution"
_ENTROPY = "actor.entropy_coeff=VALUE, which stays fixed"
_REFERENCE = "none: the reference policy has the weights that RL started from"
_TORCH = "rollout.engine=torch always decodes with slots in one KV cache"
_LOCAL = "rollout.engine=vllm: millrace starts its own replicas"

SYSTEM, PAGE = "TRL", "docs/from_trl.md"

HINTS: dict[str, str] = {
    "beta": "actor.use_kl_loss=true actor.kl_loss_coef=VALUE",
    "bf16": "model.dtype=bfloat16",
    "cache_implementation": _TORCH,
    "cast_lm_head_to_fp32": "none: logits are always float32",
    "chat_template_kwargs": "none: set them in the chat template of the folder model.path",
    "delta": "actor.clip_ratio_c=VALUE",
    "disable_dropout": "none: dropout is always off",
    "entropy_coef": _ENTROPY,
    **{f"entropy_{name}": _ENTROPY for name in ("coef_delta", "coef_max", "coef_min", "target")},
    "epsilon": "actor.clip_ratio_low=VALUE actor.clip_ratio_high=VALUE",
    "epsilon_high": "actor.clip_ratio_high=VALUE",
    "eval_dataset": "data.val_files=[FILE]",
    "eval_steps": "trainer.test_freq=VERSIONS",
    "generation_batch_size": _SYNC,
    "generation_kwargs": _ENGINE,
    "gradient_accumulation_steps": _BATCH,
    "gradient_checkpointing": "model.gradient_checkpointing=VALUE",
    "importance_sampling_level": "actor.policy_loss.importance_sampling_level=VALUE",
    "learning_rate": "actor.optim.lr=VALUE",
    "loss_type": "actor.loss_agg_mode=VALUE or actor.policy_loss.loss_mode=VALUE",
    "log_completions": "none: RUN/samples/ has all responses",
    "lr_scheduler_type": "actor.optim.lr_scheduler_type=VALUE",
    "mask_truncated_completions": "algorithm.overlong_filtering=VALUE",
    "max_completion_length": "rollout.max_response_length=VALUE",
    "max_grad_norm": "actor.optim.clip_grad=VALUE",
    "max_prompt_length": "rollout.max_prompt_length=VALUE",
    "max_steps": _STEPS,
    "max_tool_calling_iterations": "agents.max_turns=VALUE, which counts the last answer too",
    "min_p": _FULL,
    "model_init_kwargs": _MODEL,
    "model_name_or_path": _MODEL,
    "multi_objective_aggregation": "algorithm.adv_estimator=gdpo for normalize_then_sum",
    "num_generations": "rollout.n=VALUE",
    "num_generations_eval": "rollout.val_kwargs.n=VALUE",
    "num_iterations": "actor.ppo_epochs=VALUE",
    "num_train_epochs": "trainer.total_epochs=VALUE",
    "off_policy_mask_threshold": "algorithm.rollout_correction.off_policy_mask_threshold=VALUE",
    "output_dir": "trainer.run_dir=VALUE",
    "peft_config": "model.lora_rank=VALUE",
    "per_device_train_batch_size": _BATCH,
    "ref_model_mixup_alpha": _REFERENCE,
    "ref_model_sync_steps": _REFERENCE,
    "repetition_penalty": _FULL,
    "report_to": "trainer.logger=[NAME], of wandb, mlflow, trackio and tensorboard",
    "reward_funcs": "reward.function=FILE.py:NAME, or a part of reward.mix for each of several",
    "reward_weights": "reward.mix.NAME.weight=VALUE",
    "router_aux_loss_coef": "actor.router_aux_loss_coef, which balances sequences instead of micro-batches",
    "run_name": "name=VALUE",
    "sapo_temperature_neg": "actor.policy_loss.tau_neg=VALUE",
    "sapo_temperature_pos": "actor.policy_loss.tau_pos=VALUE",
    "save_steps": "trainer.save_freq=VERSIONS",
    "save_total_limit": "trainer.max_ckpt_to_keep=VALUE",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo=true for group, or false for none",
    "seed": "trainer.seed=VALUE",
    "shuffle_dataset": "data.shuffle=VALUE",
    "steps_per_generation": _SYNC,
    "sync_ref_model": _REFERENCE,
    "temperature": "rollout.temperature=VALUE",
    "top_entropy_quantile": "actor.policy_loss.top_entropy_quantile=VALUE",
    "top_k": "rollout.val_kwargs.top_k=VALUE, for validation alone",
    "top_p": "rollout.val_kwargs.top_p=VALUE, for validation alone",
    "train_dataset": "data.train_files=[FILE]",
    "trust_remote_code": "model.trust_remote_code=VALUE",
    "use_adaptive_entropy": _ENTROPY,
    "use_bias_correction_kl": "actor.use_bias_correction_kl=VALUE",
    "use_transformers_continuous_batching": _TORCH,
    "use_transformers_paged": _TORCH,
    "use_vllm": "rollout.engine=vllm",
    **{
        f"vespo_{name}": f"actor.policy_loss.vespo_{name}=VALUE"
        for name in ("k_neg", "k_pos", "lambda_neg", "lambda_pos")
    },
    "vllm_enable_sleep_mode": "rollout.free_cache_engine=VALUE",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization=VALUE",
    "vllm_group_port": _LOCAL,
    "vllm_importance_sampling_cap": "algorithm.rollout_correction.rollout_is_threshold=VALUE",
    "vllm_importance_sampling_clip_max": "algorithm.rollout_correction.rollout_is_threshold=VALUE",
    "vllm_importance_sampling_clip_min": "algorithm.rollout_correction.rollout_is_threshold_lower="
    "VALUE",
    "vllm_importance_sampling_correction": _WEIGHTS,
    "vllm_importance_sampling_mode": "algorithm.rollout_correction.rollout_is=token, or sequence",
    "vllm_max_model_length": "rollout.max_prompt_length and rollout.max_response_length",
    "vllm_mode": "mode=colocate_sync for colocate, or an asynchronous mode for server",
    "vllm_server_base_url": _LOCAL,
    "vllm_server_host": _LOCAL,
    "vllm_model_impl": _ENGINE,
    "vllm_server_port": _LOCAL,
    "vllm_server_timeout": _LOCAL,
    "vllm_structured_outputs_regex": _FULL,
    "vllm_tensor_parallel_size": "rollout.tensor_model_parallel_size=VALUE",
    "warmup_ratio": "actor.optim.lr_warmup_steps_ratio=VALUE",
    "warmup_steps": "actor.optim.lr_warmup_steps=VALUE",
    "weight_decay": "actor.optim.weight_decay=VALUE",
}
"""For each name: the setting that has its meaning, or the reason why there is none."""
