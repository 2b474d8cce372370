"""The device of an engine, and the setup of its process."""

from __future__ import annotations

import os
import resource
import time
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from millrace.config import TrainerConfig
from millrace.models.model import DTYPES


def pick(kind: str) -> torch.device:
    """Return the device of this process, by `trainer.device`.

    auto means the process's current GPU if there is one, else the CPU.
    """
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return (
        torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )


def join_group(store: dist.Store, rank: int, world_size: int, trainer: TrainerConfig) -> None:
    """Create the default process group of a train engine's ranks.

    On GPUs, the group also has a CPU backend, which checkpoints need. The other ranks wait in the
    group while rank 0 loads a model or writes an export.
    """
    backend = "gloo" if pick(trainer.device).type == "cpu" else "cpu:gloo,cuda:nccl"
    own = dist.PrefixStore("millrace/train", store)
    dist.init_process_group(
        backend,
        store=own,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=trainer.wait_deadline_s),
    )


def prepare(trainer: TrainerConfig) -> None:
    """Set the number of threads and the determinism of this process.

    Call it once, before anything is built, and before the first use of a GPU.
    """
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(threads)
    if trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if trainer.engine == "megatron" and trainer.megatron.sequence_parallel:
        # One queue keeps the order of kernels, so Megatron hides communication. CUDA reads the
        # variable when it starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def matmul_rate(trainer: TrainerConfig, dtype: str) -> float:
    """Return the operations per second of one large matmul: an upper bound for training.

    Operations are multiplications and additions. The matrices are random, and the result is the
    best of three measurements.
    """
    device = pick(trainer.device)
    size, turns = (8192, 20) if device.type == "cuda" else (1024, 4)
    a, b = (torch.randn(size, size, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    best = 0.0
    for _ in range(3):
        _ = a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(turns):
            _ = a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2.0 * size**3 * turns / (time.perf_counter() - start))
    return best


def peak_memory(trainer: TrainerConfig) -> int:
    """Return the peak memory in bytes.

    On a GPU, it is the peak of this process's tensors. On a CPU, it is the peak of this process.
    """
    device = pick(trainer.device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_memory(device: torch.device) -> int:
    """Return the bytes that a new tensor may take on a device, about."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return psutil.virtual_memory().available
