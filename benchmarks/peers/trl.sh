# Run TRL's GRPOTrainer or AsyncGRPOTrainer: trl.sh colocate|server|async. arm.sh calls it.
set -u
export TRL_EXPERIMENTAL_SILENCE=1 SERVER=http://127.0.0.1:$PORT GROUP_PORT=$((PORT + 2))
if [ "$1" = colocate ]; then
    several=$([ "$COUNT" = 1 ] || echo --multi_gpu)
    exec python3 -m accelerate.commands.launch $several --num_processes "$COUNT" \
        --num_machines 1 --mixed_precision bf16 --dynamo_backend no --main_process_port $((PORT + 1)) \
        "$HERE/trl_grpo.py" colocate
fi
# This is the command of `trl vllm-serve`. AsyncGRPOTrainer asks for the model by its folder.
CUDA_VISIBLE_DEVICES=${GPUS##*,} VLLM_SERVER_DEV_MODE=1 python3 -m vllm.entrypoints.cli.main \
    serve "$MODEL" --host 127.0.0.1 --port "$PORT" --gpu-memory-utilization 0.8 --dtype bfloat16 \
    --max-model-len $((PROMPT + RESPONSE)) --max-num-seqs 512 --max-logprobs -1 \
    --logprobs-mode processed_logprobs --weight-transfer-config '{"backend": "nccl"}' \
    --uvicorn-log-level warning --disable-uvicorn-access-log &
export CUDA_VISIBLE_DEVICES=${GPUS%%,*} MASTER_PORT=$((PORT + 3))
case $1 in
server) exec python3 "$HERE/trl_grpo.py" server ;;
async) exec python3 "$HERE/trl_async.py" ;;
esac
