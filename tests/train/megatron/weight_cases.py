"""What each of two ranks does with weights, states and a sync, for one shape after the other."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from millrace.train.megatron import engine as megatron
from tests.train.megatron import shim
from tests.train.megatron.cases import (
    CP,
    EP,
    OVERLAP,
    PLAIN,
    PP,
    SP,
    TP,
    Case,
    config_of,
)  # fmt: skip

CASES = {
    "TP2": Case("qwen2", TP),
    "TP2, one KV head": Case("one KV head", TP),
    "TP2, q and k norms": Case("qwen3", SP),
    "TP2, llama": Case("llama", TP),
    "PP2, tied": Case("qwen2", PP),
    "PP2, untied": Case("qwen3", PP),
    "DP2": Case("qwen2", PLAIN),
    "DP2, distributed optimizer": Case("qwen3", OVERLAP),
    "CP2": Case("llama", CP),
    "EP2": Case("qwen3_moe", EP),
    "EP2, mixtral": Case("mixtral", EP),
    "PP2, experts": Case("mixtral", PP),
    "TP2, ETP2": Case("qwen3_moe", SP),
    "TP2, EP2": Case("mixtral", SP | EP | {"expert_tensor_parallel_size": 1}),
}


def run_rank(rank: int, folder: str) -> None:
    """Run every case in one of two processes, and write its results."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    shim.install()
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    results = {name: run_case(name, folder, rank) for name in CASES}
    torch.save(results, f"{folder}/weights-{rank}.pt")
    dist.destroy_process_group()


def run_case(name: str, folder: str, rank: int) -> dict[str, Any]:
    case = CASES[name]
    config = config_of("megatron", case.keys, 2)
    engine = megatron.build(config, f"{folder}/{case.model}", rank=rank, world_size=2)
    found: dict[str, Any] = {
        "shards": [(n, w, d, first, t.clone()) for n, w, d, first, t in engine.shards()],
        "whole": {n: t.clone() for n, t in engine.full_weights()},
    }
    target = f"{folder}/{name} exported"
    if rank == 0:
        Path(target).mkdir()
    dist.barrier()
    asyncio.run(engine.export(target))
    asyncio.run(engine.close())
    return found
