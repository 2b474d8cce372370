"""Keys of verl that change nothing here, and the reason. Patterns count in their order."""

from __future__ import annotations

_PACKED = "batches are always packed up to actor.ppo_max_token_len_per_gpu tokens, without padding"
_CHUNKS = "log-probs and entropy are always computed in chunks of the vocabulary pass"
_OWN_PASS = "a pass without gradients uses the packing of the training passes"
_FOLLOWS = "the critic uses the policy's setting"
_TEXT = "prompts are text"
_SEED = "trainer.seed decides every random stream"
_IF_ON = "it acts only with a feature that is off"
_FAST = "it changes speed alone"
_FSDP = "the reference policy uses the policy's settings"
_CLASSIFIER = "a reward model is a classifier in transformers, which draws no tokens"
_ATTENTION = "each engine chooses its own attention"
_SIDES = ("actor", "critic")
_FUSIONS = (
    *("apply_rope", "masked_softmax", "bias_activation", "bias_dropout", "bias_swiglu"),
    *("gradient_accumulation", "moe_permute", "moe_router"),
)

NEEDLESS: dict[str, str] = {
    "actor.calculate_entropy": "the entropy is always a metric",
    "actor.calculate_sum_pi_squared": "the estimator that needs it has it",
    "actor.checkpoint.save_contents": "a checkpoint always has everything; `millrace export` writes "
    "a model",
    **dict.fromkeys(
        (
            "actor.checkpoint.contents",
            "critic.checkpoint.contents",
            "trainer.checkpoint.save_contents",
        ),
        "a checkpoint always has everything; `millrace export` writes a model",
    ),
    **{
        f"{side}.{name}": why
        for side in _SIDES
        for name, why in {
            "checkpoint.mbridge_config": "weights are always read from and written to Hugging Face "
            "folders",
            "optim.lr_wsd_decay_*": _IF_ON,
            "optim.muon_*": _IF_ON,
            "optim.use_checkpoint_opt_param_scheduler": "a resume continues the schedule",
            "optim.use_precision_aware_optimizer": "optimizer states are float32",
        }.items()
    },
    "*.profile.*": _IF_ON,
    "actor.checkpoint.strict": "a checkpoint is always loaded whole",
    "actor.data_loader_seed": _SEED,
    "actor.entropy_checkpointing": _CHUNKS,
    "actor.entropy_from_logits_*": _CHUNKS,
    "actor.fsdp_config.entropy_*": _CHUNKS,
    "actor.fsdp_config.forward_*": "FSDP2 decides it",
    **dict.fromkeys(
        ("actor.fsdp_config.grad_offload", "ref.param_offload"),
        "it moves with the weights: trainer.offload",
    ),
    "actor.fsdp_config.optimizer_offload": "the optimizer moves with the weights: trainer.offload",
    "actor.fsdp_config.pad_to_length*": _PACKED,
    "actor.fsdp_config.reshard_after_forward": "FSDP2 decides it",
    "actor.fsdp_config.seed": _SEED,
    "actor.fsdp_config.turbo_config.*": "it belongs to another engine of verl",
    "actor.fsdp_config.use_no_sync_for_gradient_accumulation": _FAST,
    "actor.fsdp_config.use_orig_params": "FSDP2 always keeps the parameters",
    "actor.fsdp_config.wrap_policy.*": "each decoder layer is one unit",
    **{
        f"{side}.optim.override_optimizer_config.{name}": _FAST
        for side in _SIDES
        for name in ("fused", "foreach", "capturable", "differentiable")
    },
    **{
        f"actor.optim.override_optimizer_config.{name}": "the optimizer moves with the weights: "
        "trainer.offload"
        for name in (
            *("optimizer_cpu_offload", "optimizer_offload_fraction", "offload_fraction"),
            "overlap_cpu_optimizer_d2h_h2d",
        )
    },
    "actor.optim.override_optimizer_config.use_precision_aware_optimizer": "optimizer states are "
    "float32",
    **dict.fromkeys(
        ("actor.megatron.use_mbridge", "actor.megatron.vanilla_mbridge"),
        "weights are always read from and written to Hugging Face folders",
    ),
    "actor.megatron.use_dist_checkpointing": "a checkpoint loads in any sizes of groups",
    "actor.megatron.use_remove_padding": _PACKED,
    "actor.megatron.seed": _SEED,
    **{
        f"actor.megatron.{part}_offload": "it moves with the weights: trainer.offload"
        for part in ("grad", "optimizer")
    },
    **{
        f"actor.megatron.override_transformer_config.{name}": _FAST
        for name in (
            *(f"{part}_fusion" for part in _FUSIONS),
            *("deallocate_pipeline_outputs", "persist_layer_norm", "moe_grouped_gemm"),
            *("moe_enable_deepep", "moe_token_dispatcher_type", "moe_router_dtype"),
        )
    },
    **{
        f"actor.megatron.override_transformer_config.{name}": _ATTENTION
        for name in ("attention_backend", "use_flash_attn")
    },
    "ref.megatron.*": _FSDP,
    "actor.optim.zero_indexed_step": "the first step uses lr / lr_warmup_steps",
    "actor.pad_to_length*": _PACKED,
    "actor.ppo_micro_batch_size*": _PACKED,
    "actor.sum_pi_squared_checkpointing": _CHUNKS,
    "actor.use_dynamic_bsz": _PACKED,
    "actor.use_fused_kernels": _CHUNKS,
    "actor.use_prefix_grouper": _FAST,
    "actor.use_remove_padding": _PACKED,
    "algorithm.filter_groups.max_inflight_gen_batches": "a dropped sample is replaced at once",
    "algorithm.pf_ppo.*": _IF_ON,
    "async_training.checkpoint_engine.*": "weights always go in buckets: sync.bucket_mb",
    "async_training.concurrent_samples_per_replica": "the ledger's capacity and "
    "rollout.max_num_seqs bound the requests",
    "async_training.dynamic_schedule_*": _IF_ON,
    "critic.checkpoint.async_save": "trainer.async_save",
    "critic.checkpoint.save_contents": "a checkpoint always has everything",
    "critic.data_loader_seed": _SEED,
    "critic.enable": "algorithm.adv_estimator=gae has a critic, other estimators have none",
    "critic.forward_*": _OWN_PASS,
    "critic.fsdp.*": _FOLLOWS,
    "critic.fsdp_config.*": _FOLLOWS,
    "critic.model.*": _FOLLOWS,
    "critic.optim.zero_indexed_step": "the first step uses lr / lr_warmup_steps",
    "critic.ppo_max_token_len_per_gpu": _PACKED,
    "critic.ppo_micro_batch_size*": _PACKED,
    "critic.use_dynamic_bsz": _PACKED,
    "data.audio_key": _TEXT,
    "data.dataloader_num_workers": "tokens are made once, before the run",
    "data.filter_overlong_prompts_workers": "tokens are made once, before the run",
    "data.image_key": _TEXT,
    "data.image_patch_size": _TEXT,
    "data.mm_processor_kwargs": _TEXT,
    "data.return_*": "a reward function gets every column of a row",
    "data.seed": _SEED,
    "data.truncation": "a prompt is never cut: a longer one is an error, or is left out with "
    "data.filter_overlong_prompts=true",
    "data.use_shm": _FAST,
    "data.val_batch_size": "validation sends all problems at once",
    "data.validation_shuffle": "every problem is validated, so the order does not matter",
    "data.video_key": _TEXT,
    "distillation.*": _IF_ON,
    "global_profiler.*": _IF_ON,
    "critic.nccl_timeout": "sync.timeout_s bounds a transfer of weights",
    "reward_model.nccl_timeout": "sync.timeout_s bounds a transfer of weights",
    "nccl_timeout": "sync.timeout_s bounds a transfer of weights",
    "checkpoint_engine": "weights always go in buckets: sync.bucket_mb",
    "model.override_config.attn_implementation": _ATTENTION,
    "model.fused_kernel_options.*": _CHUNKS,
    "model.gradient_checkpointing_kwargs.*": "trainer.megatron.recompute_granularity decides it",
    "model.lora.*": _IF_ON,
    "model.mtp.*": _IF_ON,
    "model.tiled_mlp.num_shards": _IF_ON,
    "model.use_fused_kernels": _CHUNKS,
    "model.use_liger": "it changes speed alone; model.compile=true is another way",
    "model.use_remove_padding": _PACKED,
    "model.use_shm": _FAST,
    "ray_kwargs.*": "trainer.ray_address names a running cluster",
    "ref.entropy_*": _CHUNKS,
    "ref.fsdp_config.*": _FSDP,
    "ref.log_prob_*": _OWN_PASS,
    "ref.optim.*": "the reference policy is not trained",
    "ref.pad_to_length": _PACKED,
    "ref.use_torch_compile": _FSDP,
    "reward.reward_kwargs.overlong_buffer_cfg.log": "the penalty is always a metric",
    "reward.reward_manager.module.name": _IF_ON,
    "reward.reward_manager.source": "reward.function names the function",
    "reward.reward_model.enable_resource_pool": "reward.model.share places a reward model",
    "reward.reward_model.n_gpus_per_node": "reward.model.num_workers counts its processes",
    "reward.reward_model.nnodes": "reward.model.num_workers counts its processes",
    "reward.reward_model.rollout.*": _CLASSIFIER,
    "reward.sandbox_fusion._target_": "millrace builds its own objects",
    "reward_manager.module.name": _IF_ON,
    "reward_manager.source": "reward.function names the function",
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": "the penalty is always a metric",
    "reward_model.enable_resource_pool": "reward.model.share places a reward model",
    "reward_model.forward_max_token_len_per_gpu": _CLASSIFIER,
    "reward_model.launch_reward_fn_async": "rewards are always computed beside the rollouts",
    "reward_model.micro_batch_size": _CLASSIFIER,
    "reward_model.model.fsdp_config.*": _CLASSIFIER,
    "reward_model.megatron.*": _CLASSIFIER,
    "reward_model.param_offload": _CLASSIFIER,
    "reward_model.model.input_tokenizer": "a reward model reads text through its own chat template",
    "reward_model.model.use_*": _FAST,
    "reward_model.n_gpus_per_node": "reward.model.num_workers counts its processes",
    "reward_model.nnodes": "reward.model.num_workers counts its processes",
    "reward_model.reward_loop_source": "reward.function names the function",
    "reward_model.rollout.*": _CLASSIFIER,
    "reward_model.ulysses_sequence_parallel_size": _FAST,
    "reward_model.use_dynamic_bsz": _CLASSIFIER,
    "reward_model.use_reward_loop": "rewards are always computed beside the rollouts",
    "reward_model.overlong_buffer.log": "the penalty is always a metric",
    "rollout.agent.custom_async_server._target_": "millrace builds its own objects",
    "rollout.agent.num_workers": "one process drives all requests",
    "rollout.calculate_log_probs": "log-probs are always computed",
    "rollout.disable_log_stats": "it changes logs alone",
    "rollout.disaggregation.*": _IF_ON,
    "rollout.layer_name_map.*": "weights go by the names of Hugging Face's layers",
    "rollout.layered_summon": "weights go from rank to rank in buckets",
    "rollout.load_format": "the first weights come from the trainer",
    "rollout.log_prob_*": _OWN_PASS,
    "rollout.mode": "rollout engines are always asynchronous",
    "rollout.multi_turn._target_": "millrace builds its own objects",
    "rollout.multi_turn.max_user_turns": "each follows a turn of the policy: agents.max_turns",
    "rollout.multi_turn.tokenization_sanity_check_mode": "drawn tokens are never encoded again",
    "rollout.multi_stage_wake_up": "weights and KV cache wake up together",
    "rollout.prometheus.*": _IF_ON,
    "rollout.router_config_path": "requests go to their home replica, or to the least-loaded one",
    "rollout.seed": _SEED,
    "rollout.enable_sleep_mode": "rollout.free_cache_engine decides it",
    "rollout.swap_space": "vLLM's present engine moves no KV cache to the host",
    "rollout.skip_dump_dir": _IF_ON,
    "rollout.skip_tokenizer_init": "engines get tokens",
    "rollout.trace.*": _IF_ON,
    "skip.*": _IF_ON,
    "trainer.balance_batch": "ranks always get rows of equal cost, tokens and attention",
    "trainer.del_local_ckpt_after_load": "trainer.max_ckpt_to_keep decides it",
    "trainer.val_generations_to_log_to_wandb": "the run's folder always has transcripts of "
    "validation",
    "trainer.log_val_generations": "the run's folder always has transcripts of validation",
    "trainer.max_critic_ckpt_to_keep": "a checkpoint has both models: trainer.max_ckpt_to_keep",
    "trainer.ray_wait_register_center_timeout": "trainer.wait_deadline_s bounds every wait",
    "trainer.*_nsight_options*": _IF_ON,
    "trainer.npu_profile.*": _IF_ON,
    "trainer.use_legacy_worker_impl": "millrace has one train engine",
    "trainer.use_v1": "millrace has one trainer",
    "trainer.v1.separate_async.hybrid_rollout.*": _IF_ON,
    "trainer.v1.sampler.sync_refill_failed_groups": "a dropped sample is always replaced",
    "trainer.v1.sync": _IF_ON,
    "transfer_queue.*": "samples stay with the driver",
    "*._target_": "millrace builds its own objects",
    "*.profiler.*": _IF_ON,
    "profiler.*": _IF_ON,
    "*.router_replay.*": _IF_ON,
    "*.qat.*": _IF_ON,
}
