"""TRL's GRPOTrainer with vLLM: `trl_grpo.py colocate|server`. trl.sh calls it."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("PYTORCH_ALLOC_CONF", "")  # transformers would set one that vLLM refuses
import trl_common as common
from problems import trl_reward
from trl import GRPOConfig, GRPOTrainer

if __name__ == "__main__":
    colocated = sys.argv[1] == "colocate"
    prompt = int(os.environ["PROMPT"])
    placement = (
        {"vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": prompt + common.RESPONSE}
        if colocated
        else {
            "vllm_server_base_url": os.environ["SERVER"],
            "vllm_server_timeout": 400.0,
            "vllm_group_port": int(os.environ["GROUP_PORT"]),
        }
    )
    rows = 128 if common.TASK == "sums" else 32  # of a forward pass
    config = GRPOConfig(
        **common.COMMON,
        **placement,
        use_vllm=True,
        vllm_mode=sys.argv[1],
        vllm_importance_sampling_correction=False,
        beta=0.0,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=256 // rows // (int(os.environ["COUNT"]) if colocated else 1),
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )
    trainer = GRPOTrainer(
        model=common.MODEL,
        reward_funcs=trl_reward,
        args=config,
        train_dataset=common.training_set(),
        processing_class=common.tokenizer(),
    )
    trainer.add_callback(common.EventRecorder())
    trainer.train()
    common.held_out(trainer)
    trainer.accelerator.wait_for_everyone()
