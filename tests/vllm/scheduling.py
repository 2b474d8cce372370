"""A scheduler of vLLM on its own, with drawn tokens that a seed decides."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16


def make_scheduler(
    kind: type[Scheduler], folder: Path, *, blocks: int, requests: int, batch: int
) -> Scheduler:
    """Make a scheduler of `blocks` KV blocks, for so many requests and tokens of a step."""
    config = AsyncEngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=224,
        max_num_seqs=requests,
        max_num_batched_tokens=batch,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        block_size=BLOCK,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    attention = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32
    )
    init_none_hash(sha256)
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], attention)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


def make_request(name: str, prompt: list[int], length: int, *, streams: bool = False) -> Request:
    params = SamplingParams(
        max_tokens=length,
        seed=1,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
    )
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def drawn(scheduler: Scheduler, step: Any) -> ModelRunnerOutput:
    """Return the output of the step that was scheduled last.

    Names and lengths decide the tokens and log-probs.
    """
    names: list[str] = list(step.num_scheduled_tokens)
    tokens: list[list[int]] = []
    log_probs = np.zeros((len(names), 1), dtype=np.float32)
    for i, name in enumerate(names):
        request = scheduler.requests[name]
        if request.is_prefill_chunk:
            tokens.append([])
            continue
        seed = zlib.crc32(f"{name} {request.num_computed_tokens}".encode())
        tokens.append([3 + seed % 200])
        log_probs[i] = -(seed % 1000) / 100
    places = np.zeros((len(names), 1), dtype=np.int32)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=tokens,
        logprobs=LogprobsLists(places, log_probs, places[:, 0]),
        prompt_logprobs_dict={},
        pooler_output=[],
    )
