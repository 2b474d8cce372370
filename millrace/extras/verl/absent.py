"""Keys of verl for features that millrace does not have. Patterns count in their order."""

from __future__ import annotations

from millrace.extras.verl.kinds import Absent

_MEGATRON = Absent("this setting of Megatron's", "leave the key out, or a key of trainer.megatron")
_CRITIC = Absent("critics in Megatron", "actor_rollout_ref.actor.strategy=fsdp2 without this key")
_STAGES = Absent("several parts of a model on each pipeline stage", "leave the key out", (1,))
_AGENT = Absent("agent loops of your own", "agents.program or agents.environment=path.py:Class")
_BIAS = Absent(
    "a bias that balances experts, which Qwen3-MoE and Mixtral have not",
    "actor.router_aux_loss_coef",
)
_REPLAY = Absent(
    "router replay in other models than the policy", "leave the key out", ("disabled",)
)
_MANAGER = Absent(
    "reward managers other than naive, dapo, batch and prime",
    "a function in reward.function, and reward.overlong_buffer for the penalty",
    ("naive", "dapo", "batch", "prime"),
)
_OWN_MANAGER = Absent("a reward manager of your own", "a function in reward.function")
_SANDBOX = Absent("a code sandbox", "a function in reward.function that calls it", (64, 1024))
_OPTIMIZER = Absent(
    "optimizers other than AdamW",
    "leave the key out",
    ("AdamW", "adamw", "adam", "torch.optim"),
)
_STATES = Absent(
    "optimizer states and gradients in bfloat16",
    "leave the key out: they are float32",
    ("fp32", "float32"),
)
_MEGATRON_OPTIM = {
    "lr_warmup_init": Absent("a warm-up that begins above 0", "leave the key out"),
    "weight_decay_incr_style": Absent(
        "a weight decay that grows", "leave the key out", ("constant",)
    ),
    "use_layer_wise_distributed_optimizer": _OPTIMIZER,
    **dict.fromkeys(("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), _STATES),
}
"""Arguments of the optimizer with verl's Megatron engine."""
_OTHER_OPTIM = ("name", "decay_type", "min_lr_factor", "lr_min", "lr_start", "lr_decay_ratio")
"""Arguments of the optimizer with verl's other engines."""
_OVERRIDES = Absent(
    "arguments of AdamW other than betas, eps, lr and weight_decay", "leave the key out"
)
_MASTER = Absent(
    "master weights in bfloat16",
    "leave the key out: they are float32. model.dtype is the dtype of the computation",
    ("fp32", "float32"),
)
_ARGUMENTS = Absent(
    "arguments of a reward function in the configuration",
    "defaults of the function's parameters",
    mapping=True,
)
_REWARD_LOOP = Absent("a reward loop of your own", "a function in reward.function")
_WARM_UP = Absent(
    "a number of batches in flight", "async_training.staleness_threshold bounds them", (1,)
)
_SAMPLER = Absent("a sampler in verl's form", "data.sampler=FILE.py:NAME, docs/own_algorithm.md")
_CHECK_MODEL = "the critic has the policy's architecture: set it for actor_rollout_ref.model"
_PROFILER = Absent("a profiler", "leave the key out")
_QUANTIZED = Absent("quantised weights", "leave the key out")
_EXPERTS = Absent("expert and data parallel replicas", "rollout.n_gpus_per_node for replicas", (1,))
_SHARING = Absent("lending trainer GPUs to rollouts", "leave the key out")
_MM = Absent("prompts with images, audio or video", "leave the key out")
_STRATEGY = Absent(
    "train engines other than FSDP2 and Megatron",
    "actor_rollout_ref.actor.strategy=fsdp2",
    ("fsdp", "fsdp2", "megatron"),
)

ABSENT: dict[str, Absent] = {
    **{f"{side}.optim.{name}": _STRATEGY for side in ("actor", "critic") for name in _OTHER_OPTIM},
    "actor.fsdp_config.model_dtype": _MASTER,
    **{
        f"actor.fsdp_config.mixed_precision.{part}_dtype": Absent(
            f"a {part}_dtype of bfloat16", "leave the key out: it is float32", ("fp32", "float32")
        )
        for part in ("reduce", "buffer")
    },
    "actor.fsdp_config.strategy": _STRATEGY,
    "actor.freeze_vision_tower": _MM,
    "actor.megatron.virtual_pipeline_model_parallel_size": _STAGES,
    "actor.optim.num_cycles": Absent("several cosine cycles", "leave the key out", (0.5,)),
    "actor.optim.optimizer_impl": _OPTIMIZER,
    "actor.optim.override_optimizer_config*": _OVERRIDES,
    **{
        f"{side}.optim.{name}": row
        for side in ("actor", "critic")
        for name, row in _MEGATRON_OPTIM.items()
    },
    "actor.profile.use_profile": _PROFILER,
    "actor.profiler.enable": _PROFILER,
    "actor.shuffle": Absent("a shuffle of mini-batches", "leave the key out"),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": Absent(
        "a lower bound of rejection in a key of its own", "rollout_rs_threshold=LOWER_UPPER"
    ),
    "algorithm.use_pf_ppo": Absent("PF-PPO", "leave the key out"),
    "async_training.use_dynamic_resource_scheduling": _SHARING,
    "async_training.use_trainer_do_validate": _SHARING,
    "critic.fsdp.model_dtype": _MASTER,
    "critic.fsdp.strategy": _STRATEGY,
    "critic.model.fsdp_config.model_dtype": _MASTER,
    **{
        f"critic.model.{name}": Absent(f"a critic with its own {name}", _CHECK_MODEL)
        for name in ("external_lib", "hf_config_path", "lora_adapter_path", "tokenizer_path")
    },
    "critic.model.lora.rank": Absent("Megatron's adapters", "actor_rollout_ref.model.lora_rank"),
    "critic.model.mtp.enable": Absent("multi-token prediction", "leave the key out"),
    "critic.model.override_config*": Absent(
        "a config.json of the critic's own", _CHECK_MODEL, mapping=True
    ),
    "critic.optim.num_cycles": Absent("several cosine cycles", "leave the key out", (0.5,)),
    "critic.optim.optimizer_impl": _OPTIMIZER,
    "critic.optim.override_optimizer_config*": _OVERRIDES,
    "critic.profiler.enable": _PROFILER,
    "critic.shuffle": Absent("a shuffle of mini-batches", "leave the key out"),
    "critic.strategy": _STRATEGY,
    "data.apply_chat_template_kwargs*": Absent(
        "arguments of the chat template",
        "a chat template in the model's folder that sets them",
        mapping=True,
    ),
    "data.custom_cls.*": Absent(
        "a data set class of your own", "its rows as parquet or JSONL in data.train_files"
    ),
    "data.datagen.*": Absent("a generator of data", "task:NAME or reasoning_gym:NAME as a source"),
    "data.sampler.*": _SAMPLER,
    "data.reward_fn_key": Absent(
        "another column for the data source", "a column data_source", ("data_source",)
    ),
    "data.tokenizer": Absent("a tokenizer of its own", "a tokenizer in the model's folder"),
    "distillation.enabled": Absent(
        "verl's keys of distillation",
        "leave the key out, and set teachers.NAME.path=FOLDER: docs/teachers.md has its keys",
    ),
    "global_profiler.tool": _PROFILER,
    "model.custom_chat_template": Absent(
        "a chat template in the configuration", "a chat template in the model's folder"
    ),
    "model.enable_activation_offload": Absent(
        "activation offload", "model.gradient_checkpointing=true"
    ),
    "model.exclude_modules": Absent("modules without adapters", "model.target_modules"),
    "model.external_lib": Absent("packages that a model imports", "model.trust_remote_code=true"),
    "model.hf_config_path": Absent("a config.json elsewhere", "config.json in the model's folder"),
    "model.lora.rank": Absent("Megatron's adapters", "actor_rollout_ref.model.lora_rank"),
    "model.lora_adapter_path": Absent(
        "a start from adapters", "merge the adapters into the model first"
    ),
    "model.mtp.enable": Absent("multi-token prediction", "leave the key out"),
    "model.tiled_mlp.enabled": Absent("tiled MLPs", "model.gradient_checkpointing=true"),
    "model.tokenizer_path": Absent("a tokenizer elsewhere", "the tokenizer in the model's folder"),
    "ref.model.*": Absent(
        "a reference policy that is another model",
        "leave the key out: it has the weights that RL started from",
    ),
    "ref.strategy": _STRATEGY,
    "custom_reward_function.reward_kwargs*": _ARGUMENTS,
    "reward.custom_reward_function.reward_kwargs*": _ARGUMENTS,
    "reward.reward_kwargs*": _ARGUMENTS,
    "reward.reward_manager.module.path": _OWN_MANAGER,
    "reward.reward_manager.name": _MANAGER,
    "reward.sandbox_fusion.*": _SANDBOX,
    "reward_manager.module.path": _OWN_MANAGER,
    "reward_manager.name": _MANAGER,
    "reward_model.model.external_lib": Absent(
        "packages that a model imports", "reward.model.trust_remote_code=true"
    ),
    "reward_model.model.override_config*": Absent(
        "overrides of a reward model's config.json",
        "the changed value in its config.json",
        mapping=True,
    ),
    "reward_model.reward_kwargs*": _ARGUMENTS,
    "reward_model.reward_loop_class_name": _REWARD_LOOP,
    "reward_model.reward_loop_module_path": _REWARD_LOOP,
    "reward_model.reward_manager": _MANAGER,
    "reward_model.sandbox_fusion.*": _SANDBOX,
    "reward_model.strategy": _STRATEGY,
    "rollout.agent.agent_loop_config_path": _AGENT,
    "rollout.agent.custom_async_server.*": _AGENT,
    "rollout.agent.default_agent_loop": Absent(
        "agent loops of your own",
        "agents.program or agents.environment=path.py:Class",
        ("single_turn_agent", "tool_agent"),
    ),
    "rollout.checkpoint_engine.backend": Absent(
        "other backends of the weight sync", "leave the key out", ("nccl", "naive")
    ),
    "rollout.checkpoint_engine.custom_backend_module": Absent(
        "other backends of the weight sync", "leave the key out"
    ),
    "rollout.checkpoint_engine.engine_kwargs*": Absent(
        "other backends of the weight sync", "sync.bucket_mb and sync.timeout_s"
    ),
    "rollout.data_parallel_size": _EXPERTS,
    "rollout.disaggregation.enabled": Absent("replicas for prefill alone", "leave the key out"),
    "rollout.engine_kwargs.sglang*": Absent("the sglang engine", "rollout.engine_kwargs for vLLM"),
    "rollout.engine_kwargs.trtllm*": Absent(
        "the TensorRT-LLM engine", "rollout.engine_kwargs for vLLM"
    ),
    "rollout.expert_parallel_size": _EXPERTS,
    "rollout.logprobs_mode": Absent(
        "log-probs of another distribution than the sampled one",
        "leave the key out",
        ("processed_logprobs",),
    ),
    "rollout.moe_load_balance_metrics_interval": Absent(
        "vLLM's own balance of experts as metrics", "actor/router_load, which the trainer reports"
    ),
    "rollout.mtp*": Absent("multi-token prediction", "leave the key out"),
    "rollout.multi_turn.interaction_config_path": Absent(
        "interactions of verl's form", "agents.environment=path.py:Class"
    ),
    "rollout.multi_turn.num_repeat_rollouts": Absent("repeated rollouts", "rollout.n"),
    "rollout.multi_turn.tool_response_truncate_side": Absent(
        "cuts at an end of a tool's result", "middle", ("middle",)
    ),
    "rollout.multi_turn.use_inference_chat_template": Absent(
        "histories that are rendered anew for each turn", "agents.history=template"
    ),
    "rollout.over_sample_rate": Absent(
        "over-sampling that drops slow samples", "async_training.staleness_threshold"
    ),
    "rollout.pipeline_model_parallel_size": Absent(
        "pipeline parallel replicas", "rollout.tensor_model_parallel_size", (1,)
    ),
    "rollout.prometheus.enable": Absent("a Prometheus endpoint", "metrics.jsonl and TensorBoard"),
    "rollout.qat*": _QUANTIZED,
    "rollout.quantization_*": _QUANTIZED,
    "rollout.scheduling_policy": Absent("other schedules in vLLM", "leave the key out", ("fcfs",)),
    "rollout.skip_rollout": Absent("rollouts from a file", "leave the key out"),
    "rollout.trace.backend": Absent("traces of rollouts", "leave the key out"),
    "sandbox_fusion.*": _SANDBOX,
    "skip.async_rollout.enable": Absent("rollouts from a file", "leave the key out"),
    "skip.rollout.enable": Absent("rollouts from a file", "leave the key out"),
    "skip.rollout_tq.enable": Absent("rollouts from a file", "leave the key out"),
    "trainer.default_hdfs_dir": Absent("checkpoints in HDFS", "trainer.mirror=hdfs://HOST/FOLDER"),
    "trainer.esi_redundant_time": Absent(
        "a save before the lease of a node ends", "SIGTERM, which always saves"
    ),
    "trainer.rollout_data_dir": Absent("rollouts as files", "leave the key out"),
    "trainer.profile_steps": _PROFILER,
    "trainer.checkpoint_callback_class": Absent("a callback at each save", "leave the key out"),
    "trainer.v1.colocate_async.num_warmup_batches": _WARM_UP,
    "trainer.v1.sampler.custom_sampler.*": _SAMPLER,
    "trainer.v1.sampler.sampler_kwargs*": _SAMPLER,
    "trainer.v1.sampler.max_off_policy_*": Absent(
        "dropping samples by age",
        "algorithm.rollout_correction.max_token_age, or async_training.staleness_threshold",
        (8, "drop"),
    ),
    "trainer.v1.separate_async.num_warmup_batches": _WARM_UP,
    "trainer.v1.separate_async.hybrid_rollout.enable_switch": _SHARING,
    "trainer.validation_data_dir": Absent(
        "another folder for transcripts", "the transcripts in the run's folder"
    ),
    "actor.megatron.override_transformer_config.moe_router_enable_expert_bias": _BIAS,
    "actor.megatron.override_transformer_config.moe_router_bias_update_rate": _BIAS,
    "actor.megatron.*": _MEGATRON,
    "critic.megatron.*": _CRITIC,
    "*.qat.enable": _QUANTIZED,
    "*.router_replay.mode": _REPLAY,
    **{f"*.{name}.*": _STRATEGY for name in ("veomni", "torchtitan", "automodel")},
    "hydra.*": Absent("Hydra's own settings", "trainer.run_dir for the folder of the run"),
}
