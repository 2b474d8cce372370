#!/usr/bin/env bash
# Measure every figure that needs GPUs, on one machine with two, four or eight GPUs.
# Each part has its own time limit and its own log.
#
#     benchmarks/on_gpus.sh [OUT] [PART ...]
#
# The parts are tests, train, sync, megatron, faults, vllm, modes, agents, save and learn. The default
# is all of them.
#
# PYTHON is the interpreter (default: python3). `learn` needs build/reasoning, which
# benchmarks/reasoning_mix.py writes on a machine with reasoning-gym.
set -u
cd "$(dirname "$0")/.."
OUT=${1:-build/on_gpus}
[ $# -gt 0 ] && shift
PARTS=${*:-tests train sync megatron faults vllm modes agents save learn}
PYTHON=${PYTHON:-python3}
MILLRACE="$PYTHON -m millrace"
GPUS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
HALF=$((GPUS / 2))
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
# Otherwise each process of each run compiles vLLM and torch again, for 7 s and more.
unset PYTHONDONTWRITEBYTECODE
mkdir -p "$OUT"
failed=0

part() { # NAME LIMIT_S COMMAND...
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    timeout --foreground --signal=INT --kill-after=60 "$limit" "$@" > "$OUT/$name.log" 2>&1
    code=$?
    echo "== $name: exit code $code after $((SECONDS - start)) s"
    tail -n 3 "$OUT/$name.log" | cut -c1-600
    [ $code = 0 ] || failed=1
}

for one in $PARTS; do
    case $one in
    tests) part tests 600 "$PYTHON" -m pytest tests/gpu -q -p no:cacheprovider ;;
    train)
        part train-1.5b-1 90 $MILLRACE bench train shapes/qwen2_1.5b --json
        part train-1.5b-all 90 $MILLRACE bench train shapes/qwen2_1.5b trainer.n_gpus_per_node=$GPUS --json
        part train-1.5b-copies 90 $MILLRACE bench train shapes/qwen2_1.5b trainer.n_gpus_per_node=$GPUS trainer.fsdp_size=1 --json
        part train-1.5b-lora 200 $MILLRACE bench train shapes/qwen2_1.5b trainer.n_gpus_per_node=$GPUS model.lora_rank=32 --json
        # On two GPUs, the optimizer state of 7B leaves room for fewer tokens, and every layer must
        # recompute its activations.
        if [ $GPUS -gt 2 ]; then size="actor.ppo_max_token_len_per_gpu=32768"; else size="model.gradient_checkpointing_share=1.0"; fi
        part train-7b-all 120 $MILLRACE bench train shapes/qwen2_7b trainer.n_gpus_per_node=$GPUS $size --json
        ;;
    sync)
        part sync-1+1 150 $MILLRACE bench sync shapes/qwen2_7b rollout.enforce_eager=true rollout.gpu_memory_utilization=0.6 --json
        part sync-lora 150 $MILLRACE bench sync shapes/qwen2_1.5b rollout.enforce_eager=true model.lora_rank=32 --json
        [ $GPUS -gt 2 ] && part sync-halves 150 $MILLRACE bench sync shapes/qwen2_7b rollout.enforce_eager=true \
            trainer.n_gpus_per_node=$HALF rollout.n_gpus_per_node=$HALF --json
        [ $GPUS -gt 2 ] && part sync-colocated 150 $MILLRACE bench sync shapes/qwen2_7b mode=colocate_sync rollout.enforce_eager=true \
            trainer.n_gpus_per_node=$GPUS rollout.n_gpus_per_node=$GPUS --json
        ;;
    megatron)
        # An arm takes 35 to 60 s, most of it the start. `--only` takes some of them.
        part megatron-shapes 420 "$PYTHON" benchmarks/bench_train.py shapes --steps 3 --json "$OUT/megatron.jsonl"
        part megatron-long 420 "$PYTHON" benchmarks/bench_train.py long --steps 2 --json "$OUT/megatron.jsonl"
        size="trainer.engine=megatron model.compile=false model.gradient_checkpointing=false model.gradient_checkpointing_share=1.0"
        size="$size rollout.enforce_eager=true trainer.threads=8"
        part megatron-sync-1+1 150 $MILLRACE bench sync shapes/qwen2_1.5b $size --json
        part megatron-sync-tp2 240 $MILLRACE bench sync shapes/qwen2_1.5b $size mode=colocate_sync trainer.n_gpus_per_node=2 \
            rollout.n_gpus_per_node=2 rollout.tensor_model_parallel_size=2 rollout.gpu_memory_utilization=0.4 \
            trainer.megatron.tensor_model_parallel_size=2 trainer.megatron.sequence_parallel=true --json
        ;;
    faults)
        part faults 590 "$PYTHON" benchmarks/chaos.py --here --recipe quickstart_vllm --json "$OUT/faults.jsonl" \
            --faults "replica killed,replica stopped,trainer killed,trainer stopped" \
            --set rollout.n_gpus_per_node=1 rollout.gpu_memory_utilization=0.2
        part regroup 120 "$PYTHON" -m benchmarks.bench_regroup nccl --mb 4096
        ;;
    vllm)
        part vllm 400 "$PYTHON" benchmarks/bench_vllm.py --gpus 1 --model 1.5b --syncs 3 --json "$OUT/vllm.json"
        part log-probs 200 "$PYTHON" benchmarks/bench_log_probs.py --json "$OUT/log-probs.json"
        # Do resumed greedy responses equal uninterrupted ones? The first part uses kernels that do
        # not depend on the batch. The second part does not round to bf16.
        resume="$PYTHON benchmarks/bench_vllm.py --gpus 1 --model 1.5b --requests 32 --tokens 128 --arm millrace --eager --repeats 1 --syncs 2"
        part vllm-invariant 300 env VLLM_BATCH_INVARIANT=1 $resume --json "$OUT/vllm-invariant.json"
        part vllm-float32 200 $resume --dtype float32 --json "$OUT/vllm-float32.json"
        ;;
    modes)
        # The slots and the staleness of 7B are the best values of a search by simulation.
        # With more slots, async_partial reads more tokens again at each sync. The longest responses
        # take several versions.
        case $GPUS in
        2) shape=1.5b splits=1+1 size="actor.ppo_mini_batch_size=16 rollout.total_rollout_steps=320 rollout.max_num_seqs=192" ;;
        4) shape=7b splits=2+2 size="rollout.total_rollout_steps=448 rollout.max_num_seqs=88 model.gradient_checkpointing_share=0.3" ;;
        *) shape=7b splits=$HALF+$HALF size="rollout.total_rollout_steps=480 rollout.max_num_seqs=64" ;;
        esac
        compare="$MILLRACE bench modes shapes/qwen2_$shape $size async_training.staleness_threshold=4 --skip 2 --json"
        part modes 900 $compare --splits $splits --modes colocate_sync,async_partial,async_swap,one_step_off,stream_off_policy \
            --uniform colocate_sync,async_partial --folder "$OUT/modes"
        part modes-overlap 300 $compare --splits $splits --modes async_partial async_training.overlap_sync=true --folder "$OUT/modes-overlap"
        # One engine for three trainers needs more slots, so interruptions cost it the most.
        [ $GPUS = 4 ] && part modes-3+1 590 $MILLRACE bench modes shapes/qwen2_7b rollout.total_rollout_steps=416 \
            rollout.max_num_seqs=320 async_training.staleness_threshold=4 --splits 3+1 --skip 2 --json \
            --modes colocate_sync,async_partial,async_swap,one_step_off --folder "$OUT/modes-3-1"
        ;;
    agents)
        # Episodes of several turns, once with fast and once with slow tools.
        both=colocate_partial,colocate_sync splits=1+0
        [ $GPUS -gt 1 ] && both=$both,one_step_off,async_staleness,async_partial,async_swap splits=$HALF+$HALF
        for tool in 0.1,1,2 1,1,10; do
            part agents-${tool%%,*} 900 $MILLRACE bench agents shapes/qwen2_1.5b --splits $splits --modes $both \
                --staleness 1,3 --tool $tool --turns 5,0.5,12 --draw 120,0.8,512 --result 60,0.8,256 --skip 1 --json \
                rollout.max_response_length=4096 rollout.max_num_seqs=128 rollout.n=4 rollout.total_rollout_steps=128 \
                actor.ppo_mini_batch_size=16 --folder "$OUT/agents-${tool%%,*}"
        done
        ;;
    save)
        size="hidden_size=1536 num_hidden_layers=28 num_attention_heads=12 num_key_value_heads=2 intermediate_size=8960"
        part save 400 "$PYTHON" benchmarks/bench_save.py --repetitions 1 --json model.dtype=bfloat16 \
            $(printf 'model.shape.%s ' $size)
        ;;
    learn)
        part learn 590 "$PYTHON" benchmarks/bench_gpu_learning.py --gpus 2 --budget-s 560 --run-timeout-s 200 --write "$OUT/gpu_learning"
        ;;
    *) echo "error: PART = $one: no such part. Fix: one of tests train sync megatron faults vllm modes agents save learn." >&2; exit 2 ;;
    esac
done
exit $failed
