"""Keys of verl with an equal here, under another name or with other values."""

from __future__ import annotations

from millrace.extras.verl.kinds import Mapped, by_name
from millrace.extras.verl.values import (
    DROP,
    SILENT,
    all_if_none,
    everything,
    flag,
    if_set,
    loggers,
    name_of_run,
    never,
    not_none,
    one_by_one,
    one_of,
    only,
    renamed,
    resume_mode,
    updates,
)

_DTYPE = one_of(
    {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
)
_OPTIMIZER = one_of(
    {"adamw": "adamw", "AdamW": "adamw", "adam": "adamw", "muon": "muon", "Muon": "muon"}
)
_SHAPE = one_of({None: SILENT, "constant": "constant", "linear": "linear", "cosine": "cosine"})
_ROLLOUT_ENGINE = one_of(
    {"vllm": "vllm", "hf": "torch"},
    "millrace has no {} engine",
    "actor_rollout_ref.rollout.name=vllm, or hf for the torch engine",
)
_TRAIN_ENGINE = one_of(
    {"dp": "fsdp", "fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"},
    "millrace trains with FSDP2 or Megatron, and has no engine {}",
    "megatron with its sizes, or fsdp2",
)
_MODE = one_of(
    {
        "sync": "colocate_sync",
        "colocate_async": "colocate_partial",
        "separate_async": "async_partial",
    }
)
_SINKS = "metrics.jsonl is always written; millrace has no swanlab, vemlp_wandb and clearml"
_UPDATES = "verl counts updates; here it is the same number of updates in optimizer steps"
_OVERLONG = ("enable", "len", "penalty_factor")
_SIDES = ("actor", "critic")
_SAMPLED = "rollouts are always sampled"

MAPPED = by_name(
    {
        "actor.checkpoint.async_save": Mapped("trainer.async_save"),
        "{actor,critic}.checkpoint.load_contents": Mapped(
            "trainer.resume", everything, "a resume loads everything"
        ),
        **{
            f"{side}.optim.optimizer": Mapped(f"{side}.optim.optimizer", _OPTIMIZER)
            for side in _SIDES
        },
        (
            "actor.{fsdp_config.dtype,fsdp_config.mixed_precision.param_dtype,megatron.dtype} "
            "rollout.dtype"
        ): Mapped("model.dtype", _DTYPE),
        "{actor.fsdp_config,trainer}.fsdp_size": Mapped("trainer.fsdp_size", never),
        "{actor.fsdp_config,critic.fsdp,rollout}.full_determinism": Mapped("trainer.deterministic"),
        "actor.fsdp_config.offload_policy": Mapped("trainer.offload_policy"),
        "actor.{fsdp_config,megatron}.param_offload": Mapped(
            "trainer.offload", note="it acts on shared devices, and moves the optimizer too"
        ),
        "actor.fsdp_config.ulysses_sequence_parallel_size": Mapped(
            "actor.ulysses_sequence_parallel_size"
        ),
        "actor.{fsdp_config.,}use_torch_compile": Mapped("model.compile"),
        "actor.grad_clip": Mapped("actor.optim.clip_grad"),
        "actor.loss_scale_factor": Mapped("actor.loss_scale_factor", never),
        **{
            f"actor.megatron.{name}": Mapped(f"trainer.megatron.{name}", not_none)
            for name in (
                *(f"{part}_model_parallel_size" for part in ("tensor", "pipeline", "expert")),
                "context_parallel_size",
                "expert_tensor_parallel_size",
                "sequence_parallel",
                "use_distributed_optimizer",
            )
        },
        **{
            f"actor.megatron.override_ddp_config.{name}": Mapped(f"trainer.megatron.{name}")
            for name in ("overlap_grad_reduce", "overlap_param_gather")
        },
        **{
            f"actor.megatron.override_transformer_config.{name}": Mapped(
                f"trainer.megatron.{name}", not_none
            )
            for name in (
                *("recompute_granularity", "recompute_method", "recompute_num_layers"),
                "recompute_modules",
            )
        },
        "actor.{,megatron.}router_replay.mode": Mapped("model.router_replay"),
        "{actor,ref,critic,reward_model}.load_weight": Mapped(
            "model.path", only(True, "weights are always loaded")
        ),
        "actor.strategy model_engine": Mapped("trainer.engine", _TRAIN_ENGINE),
        "actor.optim.{lr_decay_style,warmup_style}": Mapped(
            "actor.optim.lr_scheduler_type", _SHAPE
        ),
        **{
            f"{side}.optim.min_lr_ratio": Mapped(f"{side}.optim.min_lr_ratio", not_none)
            for side in _SIDES
        },
        **{
            f"{side}.optim.override_optimizer_config.{name}": Mapped(f"{side}.optim.{name}")
            for side in _SIDES
            for name in ("betas", "eps", "lr", "weight_decay")
        },
        **{
            f"{side}.optim.override_optimizer_config.{name}": Mapped(
                f"{side}.optim", only(False, f"AdamW has no {name} here")
            )
            for side in _SIDES
            for name in ("amsgrad", "maximize")
        },
        "actor.policy_loss.dro_beta": Mapped("actor.policy_loss.dro_beta", not_none),
        "{actor,critic,ref}.rollout_n": Mapped("rollout.n"),
        "actor.tau_neg": Mapped("actor.policy_loss.tau_neg"),
        "actor.tau_pos": Mapped("actor.policy_loss.tau_pos"),
        "actor.use_rollout_log_probs algorithm.rollout_correction.bypass_mode": Mapped(
            "async_training.use_rollout_log_probs"
        ),
        "actor_rollout_ref.actor.optim.lr_warmup_steps": Mapped(
            "actor.optim.lr_warmup_steps", updates, _UPDATES
        ),
        "actor.optim.lr_warmup_steps": Mapped("actor.optim.lr_warmup_steps", never),
        "actor_rollout_ref.hybrid_engine": Mapped(
            "async_training.placement", flag("colocated", "separate")
        ),
        "actor_rollout_ref.rollout.n_gpus_per_node": Mapped("rollout.n_gpus_per_node"),
        "actor_rollout_ref.rollout.nnodes": Mapped("rollout.nnodes", if_set),
        "algorithm.adv_estimator": Mapped(
            "algorithm.adv_estimator", renamed({"grpo_vectorized": "grpo"})
        ),
        "algorithm.filter_groups.metric": Mapped(
            "algorithm.filter_groups.metric",
            renamed({None: "score", "seq_reward": "reward", "seq_final_reward": "reward"}),
        ),
        "algorithm.rollout_correction.rollout_is_threshold": Mapped(
            "algorithm.rollout_correction.rollout_is_threshold", not_none
        ),
        (
            "async_training.checkpoint_engine.device_buffer_size_M "
            "rollout.checkpoint_engine.update_weights_bucket_megabytes"
        ): Mapped("sync.bucket_mb"),
        "critic.grad_clip": Mapped("critic.optim.clip_grad"),
        "critic.optim.lr_warmup_steps": Mapped("critic.optim.lr_warmup_steps", never),
        **{
            f"critic.kl_ctrl.{name}": Mapped(f"algorithm.kl_ctrl.{name}")
            for name in ("type", "kl_coef", "horizon", "target_kl")
        },
        "critic.optim.{lr_decay_style,warmup_style}": Mapped(
            "critic.optim.lr_scheduler_type", _SHAPE
        ),
        "data.gen_batch_size": Mapped(
            "data.gen_batch_size",
            one_by_one,
            "samples are admitted one by one",
        ),
        "data.max_prompt_length rollout.prompt_length": Mapped("rollout.max_prompt_length"),
        "data.max_response_length rollout.response_length": Mapped("rollout.max_response_length"),
        "data.train_max_samples": Mapped("data.train_max_samples", never),
        "data.trust_remote_code": Mapped("model.trust_remote_code"),
        "data.val_max_samples": Mapped("data.val_max_samples", never),
        "model.enable_gradient_checkpointing": Mapped("model.gradient_checkpointing"),
        "model.override_config": Mapped("model.override_config", not_none),
        **{
            name: Mapped(f"reward.model.{ours}", not_none)
            for name, ours in {
                "reward.reward_model.rollout.dtype": "dtype",
                "reward_model.max_length": "max_length",
                "reward_model.micro_batch_size_per_gpu": "batch_size",
                "reward_model.model.trust_remote_code": "trust_remote_code",
            }.items()
        },
        "reward_model.num_workers": Mapped("reward.num_workers", not_none),
        "rollout.cudagraph_capture_sizes": Mapped(
            "rollout.engine_kwargs.cudagraph_capture_sizes", not_none
        ),
        "rollout.do_sample": Mapped(
            "rollout.temperature", only(True, "rollouts in training are always sampled"), _SAMPLED
        ),
        "rollout.enable_chunked_prefill": Mapped(
            "rollout.engine_kwargs.enable_chunked_prefill", flag(DROP, False)
        ),
        "rollout.engine_kwargs.vllm": Mapped("rollout.engine_kwargs", not_none),
        "rollout.multi_turn.format": Mapped(
            "agents.tool_format", one_of({"hermes": "hermes", "qwen3_coder": "qwen"})
        ),
        "rollout.multi_turn.max_assistant_turns": Mapped("agents.max_turns", never),
        "rollout.multi_turn.max_parallel_calls": Mapped("agents.max_parallel_calls"),
        "rollout.multi_turn.max_tool_response_length": Mapped(
            "agents.max_tool_tokens", note="verl counts characters, and millrace tokens"
        ),
        "rollout.name": Mapped("rollout.engine", _ROLLOUT_ENGINE),
        "rollout.n_val": Mapped("rollout.val_kwargs.n"),
        "rollout.val_temperature": Mapped("rollout.val_kwargs.temperature"),
        "rollout.test_freq": Mapped("rollout.test_freq", never),
        "rollout.top_k": Mapped("rollout.top_k", never),
        "rollout.total_epochs": Mapped("trainer.total_epochs"),
        "rollout.val_kwargs.top_k": Mapped("rollout.val_kwargs.top_k", never),
        "trainer.default_local_dir": Mapped("trainer.run_dir"),
        "trainer.experiment_name": Mapped("name", name_of_run),
        "trainer.logger": Mapped("trainer.logger", loggers, _SINKS),
        "trainer.max_actor_ckpt_to_keep": Mapped("trainer.max_ckpt_to_keep", all_if_none),
        "trainer.remove_previous_ckpt_in_save": Mapped(
            "trainer.max_ckpt_to_keep", flag(1, SILENT), "the newest checkpoint alone stays"
        ),
        "trainer.project_name": Mapped("trainer.project_name", not_none),
        "trainer.{resume,resume_mode}": Mapped("trainer.resume", resume_mode),
        "trainer.save_freq": Mapped("trainer.save_freq", never),
        "trainer.test_freq": Mapped("trainer.test_freq", never),
        "trainer.total_training_steps": Mapped("trainer.total_training_steps", never),
        "trainer.v1.separate_async.parameter_sync_step": Mapped(
            "async_training.trigger_parameter_sync_step"
        ),
        "trainer.v1.trainer_mode": Mapped("mode", _MODE),
        **{
            f"{section}.{name}": Mapped(f"reward.overlong_buffer.{name}")
            for section in (
                "reward_model.overlong_buffer",
                "reward_model.reward_kwargs.overlong_buffer_cfg",
                "reward.reward_kwargs.overlong_buffer_cfg",
            )
            for name in _OVERLONG
        },
    }
)
"""Keys with an equal under another name, or with other values."""

PATTERNS: dict[str, Mapped] = {
    "model.override_config.model_config.*": Mapped("model.override_config.*"),
    "rollout.engine_kwargs.vllm.*": Mapped("rollout.engine_kwargs.*"),
}
"""As MAPPED, with the rest of the name in place of `*`."""
