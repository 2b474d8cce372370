#!/usr/bin/env bash
# Measure rollouts in 8 bits against 16 on one GPU: eight_bit.sh [PART ...]
# The parts are decode (tokens a second of SmolLM2 and of a random 7B shape) and runs (three seeds of
# each on sums). The default is both. Each result is written as it comes. Variables:
#   MODEL  the folder of SmolLM2-135M-Instruct      OUT    the results
#   SITE   packages that are not installed          WORK   runs; a new folder
#   STEPS  40 optimizer steps of 256 responses      GPUS   0
#   SEEDS  0 1 2                                    LIMIT  400 seconds of a part; no arm begins later
#   MODE   colocate_sync                            KEYS   further keys of the runs
set -uo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
MODEL=$(realpath "${MODEL:?the folder of SmolLM2-135M-Instruct}")
OUT=${OUT:-build/eight_bit} STEPS=${STEPS:-40} SEEDS=${SEEDS:-0 1 2} MODE=${MODE:-colocate_sync}
WORK=${WORK:-$(mktemp -d /tmp/eight_bit.XXXXXX)} LIMIT=${LIMIT:-400} KEYS=${KEYS:-}
mkdir -p "$OUT" "$WORK"
OUT=$(realpath "$OUT") WORK=$(realpath "$WORK")
export CUDA_VISIBLE_DEVICES=${GPUS:-0} PYTHONPATH=$HERE/..${SITE:+:$SITE} HF_HUB_OFFLINE=1
export VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME=lo
cd "$WORK"

left() { [ $((SECONDS - began)) -lt "$LIMIT" ] || { echo "left out: $*"; return 1; }; }

decode() { # MODEL KIND
    local name
    name=decode-$(basename "$1")-$2
    left "$name" || return 0
    timeout 240 python3 "$HERE/bench_eight_bit.py" decode "$1" ${3:+--quantization "$3"} \
        > "$OUT/$name.log" 2>&1 || { echo "$name: exit $?"; grep -m 3 Error "$OUT/$name.log"; }
    grep -ho '^{"model.*' "$OUT/$name.log" | tee -a "$OUT/decode.jsonl"
    grep -ho 'Selected .*ScaledMM[A-Za-z0-9]*' "$OUT/$name.log" | sort -u
}

run() { # KIND SEED KEY=VALUE ...
    local name=$1-seed$2 seed=$2
    left "$name" || return 0
    shift 2
    # shellcheck disable=SC2086 # KEYS has many words
    timeout 240 python3 -m millrace train smollm2_vllm trainer.run_dir="$WORK/$name" model.path="$MODEL" \
        mode="$MODE" trainer.n_gpus_per_node=1 rollout.n_gpus_per_node=1 trainer.seed="$seed" \
        'data.train_files=["task:sums?smaller=99"]' 'data.val_files=["task:sums?smaller=99&size=256"]' \
        rollout.total_rollout_steps=$((32 * STEPS)) rollout.test_freq=1000000 trainer.val_before_train=false \
        trainer.save_last=false report.enable=false "$@" $KEYS > "$OUT/$name.log" 2>&1
    local code=$?
    cp "$WORK/$name/metrics.jsonl" "$OUT/$name.metrics.jsonl"
    echo "$name: exit $code after $((SECONDS - began)) s, $(tail -n 1 "$OUT/$name.log" | cut -c1-200)"
    python3 "$HERE/bench_eight_bit.py" table "$OUT" > "$OUT/table.md"
}

for part in "${@:-decode runs}"; do
    for one in $part; do
        began=$SECONDS
        if [ "$one" = decode ]; then
            decode "$MODEL" bf16
            decode "$MODEL" fp8 fp8
            decode 7b bf16
            decode 7b fp8 fp8
        else
            for seed in $SEEDS; do
                run bf16 "$seed"
                run fp8 "$seed" rollout.quantization=fp8 guard.max_quantization_gap=1
            done
            cat "$OUT/table.md"
        fi
    done
done
