# Run millrace's recipe smollm2_vllm in one mode: millrace.sh MODE [KEY=VALUE ...]. arm.sh calls it.
set -u
mode=$1 gpus=1 staleness=()
shift
case $mode in
colocate_*) gpus=$COUNT ;;
async_swap) staleness=(async_training.staleness_threshold=1) ;;
esac
exec python3 -m millrace train smollm2_vllm mode="$mode" model.path="$MODEL" \
    trainer.n_gpus_per_node=$gpus rollout.n_gpus_per_node=$gpus trainer.seed="$SEED" \
    "${staleness[@]}" rollout.total_rollout_steps=$((32 * STEPS)) \
    data.train_files="[$WORK/train.jsonl]" data.val_files="[$WORK/val.jsonl]" \
    rollout.max_prompt_length="$PROMPT" rollout.max_response_length="$RESPONSE" \
    reward.function="$HERE/problems.py:compute_score" rollout.test_freq=1000000 \
    trainer.val_before_train=false trainer.save_last=false trainer.run_dir="$RUN" "$@"
