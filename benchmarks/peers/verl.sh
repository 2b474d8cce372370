# Run a trainer of verl: verl.sh sync|async [KEY=VALUE ...]. arm.sh calls it.
set -u
kind=$1
shift
export VERL_USE_EXTERNAL_MODULES=verl_hooks VERL_LOGGING_LEVEL=WARN HYDRA_FULL_ERROR=1
export RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0 RAY_AUTH_MODE=disabled
unset RAY_ADDRESS
a=actor_rollout_ref
common=(
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
    algorithm.rollout_correction.bypass_mode=True # the old log-probs are the rollout's
    data.train_files="$WORK/train.jsonl" data.val_files="$WORK/val.jsonl" data.shuffle=True
    data.seed="$SEED" data.prompt_key=prompt data.return_raw_chat=True
    data.dataloader_num_workers=0 data.max_prompt_length="$PROMPT"
    data.max_response_length="$RESPONSE"
    $a.model.path="$MODEL" $a.model.enable_gradient_checkpointing=False
    $a.model.use_remove_padding=True +$a.model.override_config.attn_implementation=torch_varlen
    $a.actor.strategy=fsdp2 $a.actor.fsdp_config.model_dtype=fp32
    $a.actor.fsdp_config.reshard_after_forward=False $a.actor.fsdp_config.seed=$((SEED + 42))
    $a.actor.optim.lr=1e-5 $a.actor.optim.lr_warmup_steps=5
    $a.actor.optim.lr_scheduler_type=constant $a.actor.optim.weight_decay=0.0
    $a.actor.grad_clip=1.0 $a.actor.optim.clip_grad=1.0 $a.actor.ppo_mini_batch_size=32
    $a.actor.ppo_epochs=1 $a.actor.use_dynamic_bsz=True $a.actor.ppo_max_token_len_per_gpu=32768
    $a.actor.clip_ratio=0.2 $a.actor.clip_ratio_low=0.2 $a.actor.clip_ratio_high=0.28
    $a.actor.use_kl_loss=False $a.actor.entropy_coeff=0 $a.actor.data_loader_seed=$((SEED + 42))
    $a.rollout.log_prob_use_dynamic_bsz=True $a.rollout.log_prob_max_token_len_per_gpu=32768
    $a.rollout.name=vllm $a.rollout.n=8 $a.rollout.tensor_model_parallel_size=1
    $a.rollout.seed=$((SEED + 42)) $a.rollout.calculate_log_probs=True
    $a.rollout.max_model_len=$((PROMPT + RESPONSE)) $a.rollout.max_num_seqs=512
    $a.rollout.free_cache_engine=False # both sides fit in memory at once
    $a.rollout.temperature=1.0 $a.rollout.top_p=1.0 $a.rollout.top_k=-1
    $a.rollout.val_kwargs.temperature=1.0 $a.rollout.val_kwargs.top_p=1.0
    $a.rollout.val_kwargs.top_k=-1 $a.rollout.val_kwargs.n=2 $a.rollout.val_kwargs.do_sample=True
    reward.custom_reward_function.path="$HERE/problems.py"
    reward.custom_reward_function.name=compute_score
    trainer.logger='["console"]' trainer.save_freq=-1 trainer.val_before_train=False
    trainer.resume_mode=disable trainer.nnodes=1 trainer.total_epochs=2
    trainer.default_local_dir="$WORK/checkpoints" hydra.run.dir="$WORK/hydra"
    +ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init.address=local
    +ray_kwargs.ray_init._temp_dir="$WORK/ray" ray_kwargs.ray_init.num_cpus=64
)
case $kind in
sync)
    exec python3 -m verl.trainer.main_ppo "${common[@]}" trainer.use_v1=True \
        trainer.v1.trainer_mode=sync trainer.n_gpus_per_node="$COUNT" data.train_batch_size=32 \
        trainer.v1.sampler.custom_sampler.path="$HERE/verl_sampler.py" \
        trainer.v1.sampler.custom_sampler.name=PromptBuffer trainer.test_freq="$STEPS" \
        trainer.total_training_steps="$STEPS" $a.rollout.gpu_memory_utilization=0.4 "$@"
    ;;
# An optimizer step trains 32 prompts. Every second step sends weights, which is a version, and
# test_freq counts versions: only the last one is validated.
async)
    exec python3 -m verl.experimental.fully_async_policy.fully_async_main "${common[@]}" \
        $a.hybrid_engine=False data.train_batch_size=0 data.gen_batch_size=1 \
        trainer.n_gpus_per_node=1 rollout.nnodes=1 rollout.n_gpus_per_node=1 rollout.n=8 \
        rollout.total_rollout_steps=$((32 * STEPS)) async_training.staleness_threshold=0.5 \
        async_training.trigger_parameter_sync_step=2 async_training.require_batches=1 \
        async_training.partial_rollout=True async_training.concurrent_samples_per_replica=64 \
        $a.actor.use_rollout_log_probs=True trainer.test_freq=$((STEPS / 2)) \
        $a.rollout.checkpoint_engine.backend=nccl $a.rollout.gpu_memory_utilization=0.6 "$@"
    ;;
esac
