#!/usr/bin/env bash
# Distil on one GPU, and compare it with RL from the same start: teachers.sh [PART ...]
# The two arms of a part run side by side, each on its own GPU, or one after the other. Variables:
#   MODEL  the folder of SmolLM2-135M-Instruct      OUT    the results
#   SITE   packages that are not installed          WORK   models and runs; a new folder
#   STEPS  128 optimizer steps of 256 responses     GPUS   0,1 or 0
#   LR     1e-5, the learning rate of the arms
#   VALIDATE  4, the versions between validations; ANSWERS  2, to each held-out problem
#   KEYS   further keys of the arms
# The parts are start, second, rl,k1, forward,other and sources,rewards. The default is all of them.
# NAME:PROMPTSxN:LR:SCHEDULER:SEED is an arm with settings that differ: k1:64x1:3e-5:cosine:1.
# 1. Train the teacher: RL on products and sums.
# 2. Damage it with noise until its held-out score halves: the student. `second` makes another
#    teacher, damaged with other noise to 90 % of its score.
# 3. Each arm starts from the student. Its first validation is the student's score.
set -uo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
MODEL=$(realpath "${MODEL:?the folder of SmolLM2-135M-Instruct}")
OUT=${OUT:-build/teachers} STEPS=${STEPS:-128}
VALIDATE=${VALIDATE:-4} ANSWERS=${ANSWERS:-2} KEYS=${KEYS:-}
WORK=${WORK:-$(mktemp -d /tmp/teachers.XXXXXX)}
GPUS=${GPUS:-0,1} LR=${LR:-1e-5}
first=${GPUS%,*} second=${GPUS#*,}
mkdir -p "$OUT" "$WORK"
OUT=$(realpath "$OUT") WORK=$(realpath "$WORK")
export PYTHONPATH=$HERE/..${SITE:+:$SITE} HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
cd "$WORK"

run() { # NAME GPUS KEY=VALUE ...
    local name=$1 gpus=$2
    shift 2
    CUDA_VISIBLE_DEVICES=$gpus python3 -m millrace train smollm2_vllm trainer.run_dir="$WORK/${name//:/_}" \
        rollout.total_rollout_steps=$((${prompts:-32} * STEPS)) report.enable=false "$@" > "$OUT/$name.log" 2>&1
    local code=$?
    cp "$WORK/${name//:/_}/metrics.jsonl" "$OUT/$name.metrics.jsonl"
    echo "$name: exit $code, $(tail -n 1 "$OUT/$name.log" | cut -c1-200)"
}

start() {
    local keys=()
    [ "$first" != "$second" ] || keys=(mode=colocate_partial)
    run teacher "$GPUS" model.path="$MODEL" rollout.test_freq=1000000 "${keys[@]}"
    python3 -m millrace export "$WORK/teacher" "$WORK/model" > "$OUT/export.log" 2>&1
    damaged student "$first" 0.5 0
    tail -qn 1 "$OUT/student.jsonl"
}

damaged() { # NAME GPU SHARE SEED
    CUDA_VISIBLE_DEVICES=$2 python3 "$HERE/damage.py" smollm2_vllm "$WORK/model" "$WORK/damaged-$1" "$3" "$4" \
        > "$OUT/$1.jsonl" 2> "$OUT/$1.log"
}

arm() { # NAME GPU
    local own=teachers.own.path=$WORK/model other=teachers.other.path=$WORK/damaged-other keys=()
    local kind batch rate scheduler seed prompts
    IFS=: read -r kind batch rate scheduler seed <<< "$1"
    batch=${batch:-32x8} prompts=${batch%x*}
    case $kind in
    rl) ;;
    k1) keys=("$own") ;;
    forward) keys=("$own" distillation.loss_mode=forward_kl_topk) ;;
    reverse) keys=("$own" distillation.loss_mode=reverse_kl_topk) ;;
    other) keys=("$other") ;;
    sources) keys=("$own" "$other" "teachers.own.data_sources=[products]"
        "teachers.other.data_sources=[sums]") ;;
    rewards) keys=("$own" distillation.use_task_rewards=true) ;;
    esac
    case $kind in rl | rewards) ;; *) keys+=(distillation.use_task_rewards=false) ;; esac
    # shellcheck disable=SC2086 # KEYS has many words
    run "$1" "$2" "${keys[@]}" model.path="$WORK/damaged-student" mode=colocate_sync trainer.n_gpus_per_node=1 \
        rollout.n_gpus_per_node=1 rollout.test_freq="$VALIDATE" \
        rollout.val_kwargs.n="$ANSWERS" trainer.save_last=false actor.optim.lr="${rate:-$LR}" \
        actor.ppo_mini_batch_size="$prompts" rollout.n="${batch#*x}" trainer.seed="${seed:-0}" \
        actor.optim.lr_scheduler_type="${scheduler:-constant}" $KEYS
}

for part in "${@:-start second rl,k1 forward,other sources,rewards}"; do
    for names in $part; do
        if [ "$names" = start ]; then
            start
        elif [ "$names" = second ]; then
            damaged other "$second" 0.9 1
            tail -qn 1 "$OUT/other.jsonl"
        else
            arm "${names%,*}" "$first" &
            [ "$first" != "$second" ] || wait
            [ "$names" = "${names%,*}" ] || arm "${names#*,}" "$second" &
            wait
        fi
    done
done
