"""Keys of verl for features that millrace does not have. Patterns count in their order."""

from __future__ import annotations

from millrace.extras.verl.kinds import Absent, by_name

_CHECK_MODEL = "the critic has the policy's architecture: set it for actor_rollout_ref.model"
_FLOAT32 = ("fp32", "float32")
ABSENT = by_name(
    {
        "actor.megatron.*": Absent(
            "this setting of Megatron's", "leave the key out, or a key of trainer.megatron"
        ),
        "critic.megatron.*": Absent(
            "critics in Megatron", "actor_rollout_ref.actor.strategy=fsdp2 without this key"
        ),
        "{actor.fsdp_config,critic.fsdp,critic.model.fsdp_config}.model_dtype": Absent(
            "master weights in bfloat16",
            "leave the key out: they are float32. model.dtype is the dtype of the computation",
            _FLOAT32,
        ),
        **{
            f"actor.fsdp_config.mixed_precision.{part}_dtype": Absent(
                f"a {part}_dtype of bfloat16", "leave the key out: it is float32", _FLOAT32
            )
            for part in ("reduce", "buffer")
        },
        "actor.freeze_vision_tower": Absent("prompts with images, audio or video"),
        "actor.megatron.virtual_pipeline_model_parallel_size": Absent(
            "several parts of a model on each pipeline stage", off=(1,)
        ),
        "{actor,critic}.optim.num_cycles": Absent("several cosine cycles", off=(0.5,)),
        "{actor,critic}.optim.{optimizer_impl,use_layer_wise_distributed_optimizer}": Absent(
            "optimizers other than AdamW", off=("AdamW", "adamw", "adam", "torch.optim")
        ),
        "{actor,critic}.optim.override_optimizer_config*": Absent(
            "arguments of AdamW other than betas, eps, lr and weight_decay"
        ),
        "{actor,critic}.optim.lr_warmup_init": Absent("a warm-up that begins above 0"),
        "{actor,critic}.optim.weight_decay_incr_style": Absent(
            "a weight decay that grows", off=("constant",)
        ),
        "{actor,critic}.optim.{exp_avg_dtype,exp_avg_sq_dtype,main_grads_dtype}": Absent(
            "optimizer states and gradients in bfloat16",
            "leave the key out: they are float32",
            _FLOAT32,
        ),
        (
            "actor.profile.use_profile {actor,critic}.profiler.enable global_profiler.tool "
            "trainer.profile_steps"
        ): Absent("a profiler"),
        "{actor,critic}.shuffle": Absent("a shuffle of mini-batches"),
        "algorithm.rollout_correction.rollout_rs_threshold_lower": Absent(
            "a lower bound of rejection in a key of its own", "rollout_rs_threshold=LOWER_UPPER"
        ),
        "algorithm.use_pf_ppo": Absent("PF-PPO"),
        (
            "async_training.{use_dynamic_resource_scheduling,use_trainer_do_validate} "
            "trainer.v1.separate_async.hybrid_rollout.enable_switch"
        ): Absent("lending trainer GPUs to rollouts"),
        **{
            f"critic.model.{name}": Absent(f"a critic with its own {name}", _CHECK_MODEL)
            for name in ("external_lib", "hf_config_path", "lora_adapter_path", "tokenizer_path")
        },
        "{critic.model,model}.lora.rank": Absent(
            "Megatron's adapters", "actor_rollout_ref.model.lora_rank"
        ),
        "{critic.model,model}.mtp.enable rollout.mtp*": Absent("multi-token prediction"),
        "critic.model.override_config*": Absent(
            "a config.json of the critic's own",
            _CHECK_MODEL,
            mapping=True,
        ),
        "data.apply_chat_template_kwargs*": Absent(
            "arguments of the chat template",
            "a chat template in the model's folder that sets them",
            mapping=True,
        ),
        "data.custom_cls.*": Absent(
            "a data set class of your own", "its rows as parquet or JSONL in data.train_files"
        ),
        "data.datagen.*": Absent(
            "a generator of data", "task:NAME or reasoning_gym:NAME as a source"
        ),
        "{data.sampler,trainer.v1.sampler.custom_sampler}.* trainer.v1.sampler.sampler_kwargs*": Absent(
            "a sampler in verl's form", "data.sampler=FILE.py:NAME, docs/own_algorithm.md"
        ),
        "data.reward_fn_key": Absent(
            "another column for the data source", "a column data_source", ("data_source",)
        ),
        "data.tokenizer": Absent("a tokenizer of its own", "a tokenizer in the model's folder"),
        "distillation.enabled": Absent(
            "verl's keys of distillation",
            "leave the key out, and set teachers.NAME.path=FOLDER: docs/teachers.md has its keys",
        ),
        "model.custom_chat_template": Absent(
            "a chat template in the configuration", "a chat template in the model's folder"
        ),
        "model.enable_activation_offload": Absent(
            "activation offload", "model.gradient_checkpointing=true"
        ),
        "model.exclude_modules": Absent("modules without adapters", "model.target_modules"),
        "model.external_lib": Absent(
            "packages that a model imports", "model.trust_remote_code=true"
        ),
        "model.hf_config_path": Absent(
            "a config.json elsewhere", "config.json in the model's folder"
        ),
        "model.lora_adapter_path": Absent(
            "a start from adapters", "merge the adapters into the model first"
        ),
        "model.tiled_mlp.enabled": Absent("tiled MLPs", "model.gradient_checkpointing=true"),
        "model.tokenizer_path": Absent(
            "a tokenizer elsewhere", "the tokenizer in the model's folder"
        ),
        "ref.model.*": Absent(
            "a reference policy that is another model",
            "leave the key out: it has the weights that RL started from",
        ),
        (
            "{custom_reward_function,reward.custom_reward_function,reward}.reward_kwargs* "
            "reward_model.reward_kwargs*"
        ): Absent(
            "arguments of a reward function in the configuration",
            "defaults of the function's parameters",
            mapping=True,
        ),
        "{reward.reward_manager,reward_manager}.module.path": Absent(
            "a reward manager of your own", "a function in reward.function"
        ),
        "{reward.reward_manager,reward_manager}.name reward_model.reward_manager": Absent(
            "reward managers other than naive, dapo, batch and prime",
            "a function in reward.function, and reward.overlong_buffer for the penalty",
            ("naive", "dapo", "batch", "prime"),
        ),
        "{reward.sandbox_fusion,reward_model.sandbox_fusion,sandbox_fusion}.*": Absent(
            "a code sandbox", "a function in reward.function that calls it", (64, 1024)
        ),
        "reward_model.model.external_lib": Absent(
            "packages that a model imports", "reward.model.trust_remote_code=true"
        ),
        "reward_model.model.override_config*": Absent(
            "overrides of a reward model's config.json",
            "the changed value in its config.json",
            mapping=True,
        ),
        "reward_model.{reward_loop_class_name,reward_loop_module_path}": Absent(
            "a reward loop of your own", "a function in reward.function"
        ),
        "rollout.agent.agent_loop_config_path rollout.agent.custom_async_server.*": Absent(
            "agent loops of your own", "agents.program or agents.environment=path.py:Class"
        ),
        "rollout.agent.default_agent_loop": Absent(
            "agent loops of your own",
            "agents.program or agents.environment=path.py:Class",
            ("single_turn_agent", "tool_agent"),
        ),
        "rollout.checkpoint_engine.backend": Absent(
            "other backends of the weight sync", off=("nccl", "naive")
        ),
        "rollout.checkpoint_engine.custom_backend_module": Absent(
            "other backends of the weight sync"
        ),
        "rollout.checkpoint_engine.engine_kwargs*": Absent(
            "other backends of the weight sync", "sync.bucket_mb and sync.timeout_s"
        ),
        "rollout.{data_parallel_size,expert_parallel_size}": Absent(
            "expert and data parallel replicas", "rollout.n_gpus_per_node for replicas", (1,)
        ),
        "rollout.disaggregation.enabled": Absent("replicas for prefill alone"),
        "rollout.engine_kwargs.sglang*": Absent(
            "the sglang engine", "rollout.engine_kwargs for vLLM"
        ),
        "rollout.engine_kwargs.trtllm*": Absent(
            "the TensorRT-LLM engine", "rollout.engine_kwargs for vLLM"
        ),
        "rollout.logprobs_mode": Absent(
            "log-probs of another distribution than the sampled one", off=("processed_logprobs",)
        ),
        "rollout.moe_load_balance_metrics_interval": Absent(
            "vLLM's own balance of experts as metrics",
            "actor/router_load, which the trainer reports",
        ),
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
        "rollout.prometheus.enable": Absent(
            "a Prometheus endpoint", "metrics.jsonl and TensorBoard"
        ),
        "rollout.{qat*,quantization_*} *.qat.enable": Absent("quantised weights"),
        "rollout.scheduling_policy": Absent("other schedules in vLLM", off=("fcfs",)),
        "rollout.skip_rollout skip.{async_rollout,rollout,rollout_tq}.enable": Absent(
            "rollouts from a file"
        ),
        "rollout.trace.backend": Absent("traces of rollouts"),
        "trainer.default_hdfs_dir": Absent(
            "checkpoints in HDFS", "trainer.mirror=hdfs://HOST/FOLDER"
        ),
        "trainer.esi_redundant_time": Absent(
            "a save before the lease of a node ends", "SIGTERM, which always saves"
        ),
        "trainer.rollout_data_dir": Absent("rollouts as files"),
        "trainer.checkpoint_callback_class": Absent("a callback at each save"),
        "trainer.v1.{colocate_async,separate_async}.num_warmup_batches": Absent(
            "a number of batches in flight", "async_training.staleness_threshold bounds them", (1,)
        ),
        "trainer.v1.sampler.max_off_policy_*": Absent(
            "dropping samples by age",
            "algorithm.rollout_correction.max_token_age, or async_training.staleness_threshold",
            (8, "drop"),
        ),
        "trainer.validation_data_dir": Absent(
            "another folder for transcripts", "the transcripts in the run's folder"
        ),
        (
            "actor.megatron.override_transformer_config.moe_router_bias_update_rate "
            "actor.megatron.override_transformer_config.moe_router_enable_expert_bias"
        ): Absent(
            "a bias that balances experts, which Qwen3-MoE and Mixtral have not",
            "actor.router_aux_loss_coef",
        ),
        "*.router_replay.mode": Absent(
            "router replay in other models than the policy", off=("disabled",)
        ),
        "hydra.*": Absent("Hydra's own settings", "trainer.run_dir for the folder of the run"),
        (
            "{actor,critic}.optim.{decay_type,lr_decay_ratio,lr_min,lr_start,min_lr_factor} "
            "{actor,critic}.optim.name "
            "{actor.fsdp_config,critic.fsdp,critic,ref,reward_model}.strategy "
            "*.{veomni,torchtitan,automodel}.*"
        ): Absent(
            "train engines other than FSDP2 and Megatron",
            "actor_rollout_ref.actor.strategy=fsdp2",
            ("fsdp", "fsdp2", "megatron"),
        ),
    }
)
"""The row of each key, which may be a pattern."""
