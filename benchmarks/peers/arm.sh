#!/usr/bin/env bash
# Run one arm on two GPUs or one, and print its row: arm.sh NAME TASK SEED GPUS LIMIT [KEY=VALUE ...]
#   NAME   millrace:MODE, verl:sync, verl:async, trl:colocate, trl:server or trl:async
#   TASK   sums or eight     GPUS   0,1 or 0, for colocated arms      LIMIT   seconds, with start and held-out samples
# KEY=VALUE are further keys of millrace or verl. Variables:
#   MODEL  the folder of SmolLM2-135M-Instruct             STEPS  128 optimizer steps of 256 rows
#   OUT    the results; its name is the machine's          CACHE  compiled code; a new folder
#   SITE   packages that are not installed                 PEERS  the same for TRL and verl alone
set -euo pipefail
name=$1 TASK=$2 SEED=$3 GPUS=$4 limit=$5
shift 5
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
framework=${name%%[:_]*} kind=${name#*[:_]} OUT=${OUT:-build/peers/A} STEPS=${STEPS:-128}
case $TASK in
sums) PROMPT=128 RESPONSE=96 ;;
eight) PROMPT=640 RESPONSE=256 ;;
*) echo "error: TASK = $TASK: no such task. Fix: sums or eight." >&2; exit 2 ;;
esac
case $framework:$kind in
millrace:* | verl:sync | verl:async) ;;
trl:colocate | trl:server | trl:async) ;;
*) echo "error: NAME = $name: no such arm. Fix: see benchmarks/peers/README.md." >&2; exit 2 ;;
esac
MODEL=$(realpath "${MODEL:?the folder of SmolLM2-135M-Instruct}")
COUNT=$(tr , "\n" <<< "$GPUS" | wc -l)
case $COUNT:$kind in
2:* | 1:colocate* | 1:sync) ;;
*) echo "error: GPUS = $GPUS: $kind needs two GPUs. Fix: 0,1." >&2; exit 2 ;;
esac

n=1
while [ -e "$OUT/$framework-$kind-$TASK-$SEED.$n.jsonl" ]; do n=$((n + 1)); done
mkdir -p "$OUT"
tag=$(realpath "$OUT")/$framework-$kind-$TASK-$SEED.$n
WORK=$(mktemp -d /tmp/arm.XXXXXX) # Ray needs a short path
trap 'rm -rf "$WORK"' EXIT
mkdir -p "${CACHE:=$WORK/cache}/$framework"
cache=$(realpath "$CACHE/$framework") PORT=$((21000 + 1000 * ${GPUS%%,*}))
warm=$([ "$(ls -A "$cache")" ] && echo true || echo false)
case $framework in
millrace) path=$HERE/../..${SITE:+:$SITE} ;;
*) path=${PEERS:+$PEERS:}${SITE:+$SITE:}$HERE ;;
esac
export HERE TASK SEED GPUS COUNT STEPS PROMPT RESPONSE MODEL WORK PORT RUN=$tag.run EVENTS=$tag.jsonl
export PYTHONPATH=$path PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 HF_HOME=$WORK/hf VLLM_NO_USAGE_STATS=1
export CUDA_VISIBLE_DEVICES=$GPUS VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo DO_NOT_TRACK=1
unset PYTHONDONTWRITEBYTECODE # with it, every process compiles all that it imports, at each start
export XDG_CACHE_HOME=$cache VLLM_CACHE_ROOT=$cache/vllm TORCHINDUCTOR_CACHE_DIR=$cache/inductor
export TRITON_CACHE_DIR=$cache/triton TOKENIZERS_PARALLELISM=true

python3 "$HERE/problems.py" "$TASK" "$WORK"
head='{"event": "start", "t": %s, "arm": "%s", "task": "%s", "seed": %s, "steps": %s, "warm": %s}\n'
printf "$head" "$EPOCHREALTIME" "$framework:$kind${*:+ }$*" "$TASK" "$SEED" "$STEPS" "$warm" >> "$EVENTS"
code=0
cd "$WORK"
python3 "$HERE/within.py" "$limit" bash "$HERE/$framework.sh" "$kind" "$@" \
    > "$tag.log" 2>&1 || code=$?
[ "$framework" != millrace ] || python3 "$HERE/millrace_events.py" "$RUN" "$EVENTS"
printf '{"event": "end", "t": %s, "code": %s}\n' "$EPOCHREALTIME" $code >> "$EVENTS"
[ $code = 0 ] || { grep Error "$tag.log" || true; } | sort | uniq -c | sort -rn | cut -c1-300
python3 "$HERE/table.py" "$EVENTS"
exit $code
