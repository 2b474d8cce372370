#!/usr/bin/env bash
# Distil on one GPU, and compare it with RL from the same start: teachers.sh [PART ...]
# The two arms of a part run side by side, each on its own GPU, or one after the other. Variables:
#   MODEL  the folder of SmolLM2-135M-Instruct      OUT    the results
#   SITE   packages that are not installed          WORK   models and runs; a new folder
#   STEPS  128 optimizer steps of 256 responses     GPUS   0,1 or 0
#   LR     1e-5, the learning rate of the arms
# The parts are start, rl,k1, forward,other and sources,rewards. The default is all of them.
# 1. Train the teacher: RL on products and sums.
# 2. Damage it with noise until its held-out score halves: the student. And another teacher, damaged
#    with other noise to 90 % of its score.
# 3. Each arm starts from the student. Its first validation is the student's score.
set -uo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
MODEL=$(realpath "${MODEL:?the folder of SmolLM2-135M-Instruct}")
OUT=${OUT:-build/teachers} STEPS=${STEPS:-128}
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
    CUDA_VISIBLE_DEVICES=$gpus python3 -m millrace train smollm2_vllm trainer.run_dir="$WORK/$name" \
        rollout.total_rollout_steps=$((32 * STEPS)) report.enable=false "$@" > "$OUT/$name.log" 2>&1
    local code=$?
    cp "$WORK/$name/metrics.jsonl" "$OUT/$name.metrics.jsonl"
    echo "$name: exit $code, $(tail -n 1 "$OUT/$name.log" | cut -c1-200)"
}

start() {
    local keys=()
    [ "$first" != "$second" ] || keys=(mode=colocate_partial)
    run teacher "$GPUS" model.path="$MODEL" rollout.test_freq=1000000 "${keys[@]}"
    python3 -m millrace export "$WORK/teacher" "$WORK/model" > "$OUT/export.log" 2>&1
    damaged student "$first" 0.5 0
    damaged other "$second" 0.9 1
    tail -qn 1 "$OUT/student.jsonl" "$OUT/other.jsonl"
}

damaged() { # NAME GPU SHARE SEED
    CUDA_VISIBLE_DEVICES=$2 python3 "$HERE/damage.py" smollm2_vllm "$WORK/model" "$WORK/damaged-$1" "$3" "$4" \
        > "$OUT/$1.jsonl" 2> "$OUT/$1.log"
}

arm() { # NAME GPU
    local own=teachers.own.path=$WORK/model other=teachers.other.path=$WORK/damaged-other keys=()
    case $1 in
    rl) ;;
    k1) keys=("$own") ;;
    forward) keys=("$own" distillation.loss_mode=forward_kl_topk) ;;
    other) keys=("$other") ;;
    sources) keys=("$own" "$other" "teachers.own.data_sources=[products]"
        "teachers.other.data_sources=[sums]") ;;
    rewards) keys=("$own" distillation.use_task_rewards=true) ;;
    esac
    case $1 in rl | rewards) ;; *) keys+=(distillation.use_task_rewards=false) ;; esac
    run "$@" "${keys[@]}" model.path="$WORK/damaged-student" mode=colocate_sync trainer.n_gpus_per_node=1 \
        rollout.n_gpus_per_node=1 rollout.test_freq=4 trainer.save_last=false \
        actor.optim.lr="$LR"
}

for part in "${@:-start rl,k1 forward,other sources,rewards}"; do
    for names in $part; do
        if [ "$names" = start ]; then
            start
        else
            arm "${names%,*}" "$first" &
            [ "$first" != "$second" ] || wait
            arm "${names#*,}" "$second" &
            wait
        fi
    done
done
