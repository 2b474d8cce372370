"""Keys of verl that change nothing here, by the reason. Patterns count in their order."""

from __future__ import annotations

from millrace.extras.verl.kinds import by_name

_KEYS = {
    "millrace builds its own objects": (
        "{reward.sandbox_fusion,rollout.agent.custom_async_server,*}._target_"
    ),
    "the entropy is always a metric": "actor.calculate_entropy",
    "the estimator that needs it has it": "actor.calculate_sum_pi_squared",
    "a checkpoint always has everything; `millrace export` writes a model": (
        "actor.checkpoint.{contents,save_contents} critic.checkpoint.contents "
        "trainer.checkpoint.save_contents"
    ),
    "weights are always read from and written to Hugging Face folders": (
        "{actor,critic}.checkpoint.mbridge_config actor.megatron.{use_mbridge,vanilla_mbridge}"
    ),
    "it acts only with a feature that is off": (
        "{actor,critic}.optim.{lr_wsd_decay_*,muon_*} "
        "{*.profile,algorithm.pf_ppo,distillation,global_profiler,model.lora,model.mtp}.* "
        "{rollout.disaggregation,rollout.prometheus,rollout.trace,skip}.* "
        "{trainer.npu_profile,trainer.v1.separate_async.hybrid_rollout,*profiler}.* "
        "{*.router_replay,*.qat}.* async_training.dynamic_schedule_* "
        "model.tiled_mlp.num_shards {reward.reward_manager,reward_manager}.module.name "
        "rollout.skip_dump_dir trainer.*_nsight_options* trainer.v1.sync"
    ),
    "a resume continues the schedule": "{actor,critic}.optim.use_checkpoint_opt_param_scheduler",
    "optimizer states are float32": (
        "{actor.optim,critic.optim}.use_precision_aware_optimizer "
        "actor.optim.override_optimizer_config.use_precision_aware_optimizer"
    ),
    "a checkpoint is always loaded whole": "actor.checkpoint.strict",
    "trainer.seed decides every random stream": (
        "{actor,critic}.data_loader_seed {actor.fsdp_config,actor.megatron,data,rollout}.seed"
    ),
    "log-probs and entropy are always computed in chunks of the vocabulary pass": (
        "actor.{entropy_checkpointing,entropy_from_logits_*,sum_pi_squared_checkpointing} "
        "actor.use_fused_kernels {actor.fsdp_config,ref}.entropy_* model.fused_kernel_options.* "
        "model.use_fused_kernels"
    ),
    "FSDP2 decides it": "actor.fsdp_config.{forward_*,reshard_after_forward}",
    "it moves with the weights: trainer.offload": (
        "actor.fsdp_config.grad_offload ref.param_offload "
        "actor.megatron.{grad_offload,optimizer_offload}"
    ),
    "the optimizer moves with the weights: trainer.offload": (
        "actor.fsdp_config.optimizer_offload "
        "actor.optim.override_optimizer_config.{offload_fraction,optimizer_cpu_offload} "
        "actor.optim.override_optimizer_config.optimizer_offload_fraction "
        "actor.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d"
    ),
    "batches are always packed up to actor.ppo_max_token_len_per_gpu tokens, without padding": (
        "actor.fsdp_config.pad_to_length* {actor.megatron,model}.use_remove_padding "
        "actor.{pad_to_length*,ppo_micro_batch_size*,use_dynamic_bsz,use_remove_padding} "
        "critic.{ppo_max_token_len_per_gpu,ppo_micro_batch_size*,use_dynamic_bsz} "
        "ref.pad_to_length"
    ),
    "it belongs to another engine of verl": "actor.fsdp_config.turbo_config.*",
    "it changes speed alone": (
        "actor.fsdp_config.use_no_sync_for_gradient_accumulation "
        "{actor,critic}.optim.override_optimizer_config.{capturable,differentiable} "
        "{actor,critic}.optim.override_optimizer_config.{foreach,fused} "
        "actor.megatron.override_transformer_config.apply_rope_fusion "
        "actor.megatron.override_transformer_config.bias_activation_fusion "
        "actor.megatron.override_transformer_config.bias_dropout_fusion "
        "actor.megatron.override_transformer_config.bias_swiglu_fusion "
        "actor.megatron.override_transformer_config.deallocate_pipeline_outputs "
        "actor.megatron.override_transformer_config.gradient_accumulation_fusion "
        "actor.megatron.override_transformer_config.masked_softmax_fusion "
        "actor.megatron.override_transformer_config.{moe_enable_deepep,moe_grouped_gemm} "
        "actor.megatron.override_transformer_config.{moe_permute_fusion,moe_router_dtype} "
        "actor.megatron.override_transformer_config.moe_router_fusion "
        "actor.megatron.override_transformer_config.moe_token_dispatcher_type "
        "actor.megatron.override_transformer_config.persist_layer_norm actor.use_prefix_grouper "
        "{data,model}.use_shm reward_model.model.use_* reward_model.ulysses_sequence_parallel_size"
    ),
    "FSDP2 always keeps the parameters": "actor.fsdp_config.use_orig_params",
    "each decoder layer is one unit": "actor.fsdp_config.wrap_policy.*",
    "a checkpoint loads in any sizes of groups": "actor.megatron.use_dist_checkpointing",
    "each engine chooses its own attention": (
        "actor.megatron.override_transformer_config.{attention_backend,use_flash_attn} "
        "model.override_config.attn_implementation"
    ),
    "the reference policy uses the policy's settings": (
        "ref.{megatron,fsdp_config}.* ref.use_torch_compile"
    ),
    "the first step uses lr / lr_warmup_steps": "{actor,critic}.optim.zero_indexed_step",
    "a dropped sample is replaced at once": "algorithm.filter_groups.max_inflight_gen_batches",
    "weights always go in buckets: sync.bucket_mb": (
        "async_training.checkpoint_engine.* checkpoint_engine"
    ),
    "the ledger's capacity and rollout.max_num_seqs bound the requests": (
        "async_training.concurrent_samples_per_replica"
    ),
    "trainer.async_save": "critic.checkpoint.async_save",
    "a checkpoint always has everything": "critic.checkpoint.save_contents",
    "algorithm.adv_estimator=gae has a critic, other estimators have none": "critic.enable",
    "a pass without gradients uses the packing of the training passes": (
        "critic.forward_* {ref,rollout}.log_prob_*"
    ),
    "the critic uses the policy's setting": "critic.{fsdp,fsdp_config,model}.*",
    "prompts are text": "data.{audio_key,image_key,image_patch_size,mm_processor_kwargs,video_key}",
    "tokens are made once, before the run": (
        "data.{dataloader_num_workers,filter_overlong_prompts_workers}"
    ),
    "a reward function gets every column of a row": "data.return_*",
    (
        "a prompt is never cut: a longer one is an error, or is left out with "
        "data.filter_overlong_prompts=true"
    ): "data.truncation",
    "validation sends all problems at once": "data.val_batch_size",
    "every problem is validated, so the order does not matter": "data.validation_shuffle",
    "sync.timeout_s bounds a transfer of weights": (
        "critic.nccl_timeout reward_model.nccl_timeout nccl_timeout"
    ),
    "trainer.megatron.recompute_granularity decides it": "model.gradient_checkpointing_kwargs.*",
    "it changes speed alone; model.compile=true is another way": "model.use_liger",
    "trainer.ray_address names a running cluster": "ray_kwargs.*",
    "the reference policy is not trained": "ref.optim.*",
    "the penalty is always a metric": (
        "reward.reward_kwargs.overlong_buffer_cfg.log "
        "reward_model.reward_kwargs.overlong_buffer_cfg.log reward_model.overlong_buffer.log"
    ),
    "reward.function names the function": (
        "{reward.reward_manager,reward_manager}.source reward_model.reward_loop_source"
    ),
    "reward.model.share places a reward model": (
        "{reward.reward_model,reward_model}.enable_resource_pool"
    ),
    "reward.model.num_workers counts its processes": (
        "{reward.reward_model,reward_model}.{n_gpus_per_node,nnodes}"
    ),
    "a reward model is a classifier in transformers, which draws no tokens": (
        "{reward.reward_model.rollout,reward_model.model.fsdp_config}.* "
        "{reward_model.megatron,reward_model.rollout}.* "
        "reward_model.{forward_max_token_len_per_gpu,micro_batch_size,param_offload} "
        "reward_model.use_dynamic_bsz"
    ),
    "rewards are always computed beside the rollouts": (
        "reward_model.{launch_reward_fn_async,use_reward_loop}"
    ),
    "a reward model reads text through its own chat template": "reward_model.model.input_tokenizer",
    "one process drives all requests": "rollout.agent.num_workers",
    "log-probs are always computed": "rollout.calculate_log_probs",
    "it changes logs alone": "rollout.disable_log_stats",
    "weights go by the names of Hugging Face's layers": "rollout.layer_name_map.*",
    "weights go from rank to rank in buckets": "rollout.layered_summon",
    "the first weights come from the trainer": "rollout.load_format",
    "rollout engines are always asynchronous": "rollout.mode",
    "each follows a turn of the policy: agents.max_turns": "rollout.multi_turn.max_user_turns",
    "drawn tokens are never encoded again": "rollout.multi_turn.tokenization_sanity_check_mode",
    "weights and KV cache wake up together": "rollout.multi_stage_wake_up",
    "requests go to their home replica, or to the least-loaded one": "rollout.router_config_path",
    "rollout.free_cache_engine decides it": "rollout.enable_sleep_mode",
    "vLLM's present engine moves no KV cache to the host": "rollout.swap_space",
    "engines get tokens": "rollout.skip_tokenizer_init",
    "ranks always get rows of equal cost, tokens and attention": "trainer.balance_batch",
    "trainer.max_ckpt_to_keep decides it": "trainer.del_local_ckpt_after_load",
    "the run's folder always has transcripts of validation": (
        "trainer.{log_val_generations,val_generations_to_log_to_wandb}"
    ),
    "a checkpoint has both models: trainer.max_ckpt_to_keep": "trainer.max_critic_ckpt_to_keep",
    "trainer.wait_deadline_s bounds every wait": "trainer.ray_wait_register_center_timeout",
    "millrace has one train engine": "trainer.use_legacy_worker_impl",
    "millrace has one trainer": "trainer.use_v1",
    "a dropped sample is always replaced": "trainer.v1.sampler.sync_refill_failed_groups",
    "samples stay with the driver": "transfer_queue.*",
}
NEEDLESS = by_name({keys: why for why, keys in _KEYS.items()})
"""The reason of each key, which may be a pattern."""
