"""What each rank of a train engine does with the real model."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from millrace.config import Config, plugins
from millrace.ports import TrainBatch
from millrace.train import layout
from millrace.types import Sample
from tests.real.step import config_of

ROWS = {"packed": {}, "padded": {}, "alone": {"actor": {"ppo_max_token_len_per_gpu": 40}}}
"""The ways to arrange rows, and their settings.

    packed  all rows in one micro-batch, each length in a batch of its own, without padding
    padded  rows of different lengths in the same batch, with padding
    alone   about one row in a micro-batch
"""
Got = tuple[dict[str, float], list[list[float]], list[list[float]]]


def arrange(patch: pytest.MonkeyPatch, rows: str) -> None:
    """Pad as with many lengths, although the samples have few."""
    if rows == "padded":
        patch.setattr(layout, "EXACT_LENGTHS", 0)
        patch.setattr(layout, "FILLED", 0.5)


def update(engine: Any, samples: tuple[Sample, ...]) -> Got:
    """Return the metrics of the first step, and log-probs before and after it."""
    asyncio.run(engine.begin("rl", 10))
    before = asyncio.run(engine.log_probs(samples))
    report = asyncio.run(engine.step(TrainBatch(samples, 0)))
    return report.metrics, before, asyncio.run(engine.log_probs(samples))


def run(config: Config, folder: str, samples: tuple[Sample, ...], rank: int) -> Any:
    """Build an engine; return it, and what `update` returns."""
    build = plugins.load("trainer.engine", config.trainer.engine, "train_engines")
    engine = build(config, folder, rank=rank, world_size=config.sides.trainer.n_gpus_per_node)
    return engine, update(engine, samples)


def fsdp(rank: int, out: str, folder: str, samples: tuple[Sample, ...]) -> None:
    """Run two ranks: a path packed and padded, and another path with a checkpoint and an export."""
    _join(rank, out, 2)
    results: dict[str, Got] = {}
    for path, rows in (("rollout", "padded"), ("corrected", "alone"), ("sequence", "packed")):
        with pytest.MonkeyPatch.context() as patch:
            arrange(patch, rows)
            engine, results[path] = run(config_of(path, 2, **ROWS[rows]), folder, samples, rank)
        if path == "sequence":
            asyncio.run(engine.save(f"{out}/checkpoint"))
            asyncio.run(engine.export(f"{out}/export"))
        asyncio.run(engine.close())
        del engine  # two engines at once would need twice the memory
        gc.collect()
    _leave(rank, out, results)


def megatron(rank: int, out: str, folder: str, samples: tuple[Sample, ...]) -> None:
    """Run two ranks of Megatron: as two stages, and as two copies that share an optimizer."""
    from megatron.core.optimizer import clip_grads

    from tests.train.megatron import shim

    shim.install()
    clip_grads.l2_norm_impl = _norm
    _join(rank, out, 2)
    results = {}
    for name, (path, keys) in MEGATRON.items():
        config = config_of(path, 2, trainer={"engine": "megatron", "megatron": keys})
        engine, results[name] = run(config, folder, samples, rank)
        asyncio.run(engine.close())
        del engine
        gc.collect()
    _leave(rank, out, results)


def _norm(_: Any, __: Any, tensors: list[list[torch.Tensor]], *___: Any) -> Any:
    """Return a norm like Megatron's. torch adds 28 million squares one by one on a CPU.

    In float32 that is wrong by 4e-4. GPUs add them in a tree.
    """
    squares = sum(float(t.double().square().sum()) for part in tensors for t in part)
    return torch.tensor([squares**0.5]), None


MEGATRON: dict[str, tuple[str, dict[str, Any]]] = {
    "PP2": ("rollout", {"pipeline_model_parallel_size": 2}),
    "DP2": ("corrected", {}),
}
"""The shapes of two ranks that 9 heads and 3 KV heads allow, each with a path of the loss."""


def _join(rank: int, out: str, ranks: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{out}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def _leave(rank: int, out: str, results: Any) -> None:
    torch.save(results, f"{out}/results-{rank}.pt")
    dist.destroy_process_group()
