"""TRL's experimental AsyncGRPOTrainer: this GPU trains, vLLM's server draws. trl.sh calls it."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "")
import trl_common as common
from problems import trl_reward
from torch.nn.attention.varlen import varlen_attn
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl.experimental.async_grpo import async_rollout_worker as worker


class TorchVarlen:
    """The stand-in for flash-attn3 from the hub. It differs from sdpa by 0.004 in bf16."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_q: Any,
        cu_k: Any,
        max_q: int,
        max_k: int,
        softmax_scale: float | None = None,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Any:
        window = (window_size[0], 0)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        sizes = int(max_q), int(max_k)
        return varlen_attn(q, k, v, cu_q, cu_k, *sizes, scale=softmax_scale, window_size=window)


def parse_response(tokenizer: Any, ids: Any, **_: Any) -> dict[str, str]:
    """Read an answer as text. TRL reads tool calls with the templates of models that it knows."""
    return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}


packing._flash_attn = lambda: TorchVarlen
worker.add_response_schema = lambda tokenizer: tokenizer
worker.parse_response = parse_response


if __name__ == "__main__":
    rows = 256 if common.TASK == "sums" else 128  # of a forward pass
    config = AsyncGRPOConfig(
        **common.COMMON,
        dtype="float32",
        token_budget=0,
        max_staleness=4,
        weight_sync_steps=1,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=256 // rows,
        vllm_server_base_url=os.environ["SERVER"],
        vllm_server_timeout=400.0,
    )
    trainer = AsyncGRPOTrainer(
        model=common.MODEL,
        reward_funcs=trl_reward,
        args=config,
        train_dataset=common.training_set(),
        processing_class=common.tokenizer(),
    )
    trainer.add_callback(common.EventRecorder())  # after TRL's own, which starts the rollouts
    trainer.train()
    common.held_out(trainer)
    os._exit(0)  # the rollout process and NCCL's threads would wait
