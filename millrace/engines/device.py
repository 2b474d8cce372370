"""Which device an engine runs on, and how its process is set up for it."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from millrace.config import Config


def pick(config: Config) -> torch.device:
    """The device of this process: its own GPU where there are GPUs, else the CPU."""
    kind = config.trainer.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def join_group(store: dist.Store, rank: int, world_size: int, config: Config) -> None:
    """The default process group of a train engine's ranks; checkpoints need its CPU backend on GPUs too."""
    backend = "gloo" if pick(config).type == "cpu" else "cpu:gloo,cuda:nccl"
    own = dist.PrefixStore("millrace/train", store)
    dist.init_process_group(
        backend, store=own, rank=rank, world_size=world_size, timeout=timedelta(seconds=config.sync.timeout_s)
    )


def prepare(config: Config) -> None:
    """Threads and determinism of this process. Once, before anything is built."""
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(threads)
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
