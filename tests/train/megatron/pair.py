"""Two ranks that run one case after the other, over NCCL without the shim, or over gloo with it.

Every case has process groups of its own, and a deadline. A case that fails or hangs breaks the pair
of processes, and the next case starts a new one.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.train.forks import forkserver

RANKS = 2
START_S = 300.0
"""The limit for the start of a pair, which imports torch and Megatron."""
FIRST_USE_S = 300.0
"""The limit for the start of CUDA, cuBLAS and NCCL."""
GRACE_S = 3.0
"""The time that the other rank has after one rank failed."""
DUMP_S = 1.0


class Broken(AssertionError):
    """A case failed or hung, and its pair of processes is gone."""


class Pair:
    """Two processes, which start at the first case, or by `start`."""

    def __init__(self, folder: str, device: str) -> None:
        self._folder, self._device = folder, device
        self._ranks: list[Any] = []
        self._pipes: list[Connection] = []
        self._pairs = self._cases = 0
        self._ready = False

    def start(self) -> None:
        """Start both processes, without waiting for them."""
        self._pairs += 1
        self._ready = False
        # On a GPU, a rank must not have a copy of what CUDA did in another process.
        context = multiprocessing.get_context("spawn") if self._device == "cuda" else forkserver()
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            args = (rank, self._folder, self._device, theirs, self._log(rank))
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append(process)
            self._pipes.append(ours)

    def run(
        self, function: Callable[..., Any], *args: Any, limit_s: float, **keys: Any
    ) -> list[Any]:
        """Return what `function(*args, rank=rank, **keys)` returns on each rank.

        Raises Broken with the ends of the ranks' logs after an error, or after `limit_s` seconds.
        """
        if not self._ranks:
            self.start()
        if not self._ready:
            self._wait("its start", START_S)
            self._ready = True
            if function is not _first_use:  # not within the limit of a case
                self.run(_first_use, self._device, limit_s=FIRST_USE_S)
        self._cases += 1
        for pipe in self._pipes:
            pipe.send((self._cases, function, args, keys))
        self._wait(function.__name__, limit_s)
        return [
            torch.load(_result(self._folder, self._cases, rank), "cpu", weights_only=False)
            for rank in range(RANKS)
        ]

    def close(self) -> None:
        for process in self._ranks:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._ranks, self._pipes = [], []

    def _wait(self, what: str, limit_s: float) -> None:
        """Wait until both ranks answer. After a failure, kill both and raise Broken."""
        due, open_ranks, lost = time.monotonic() + limit_s, dict(enumerate(self._pipes)), set[int]()
        while open_ranks and (left := due - time.monotonic()) > 0:
            for pipe in wait(list(open_ranks.values()), left):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                del open_ranks[rank]
                try:
                    self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    lost.add(rank)
                    due = min(due, time.monotonic() + GRACE_S)
        if not open_ranks and not lost:
            return
        for rank in open_ranks:
            os.kill(self._ranks[rank].pid, signal.SIGUSR1)  # it writes its stacks
        time.sleep(DUMP_S if open_ranks else 0)
        states = {r: "failed" if r in lost else "waits" for r in (*lost, *open_ranks)}
        self.close()
        raise Broken("\n".join([
            f"pair {self._pairs} broke in {what}, and was killed; limit {limit_s:g} s",
            *(f"== rank {r} {state}:\n{self._tail(r)}" for r, state in sorted(states.items())),
        ]))  # fmt: skip

    def _log(self, rank: int) -> str:
        return f"{self._folder}/pair {self._pairs} rank {rank}.log"

    def _tail(self, rank: int) -> str:
        return "\n".join(Path(self._log(rank)).read_text(errors="replace").splitlines()[-60:])


def _first_use(device: str, rank: int) -> None:
    """Multiply on the device, and add up over both ranks."""
    own = torch.ones(64, 64, device=device)
    total = own @ own
    dist.all_reduce(total)
    if not bool((total == 64 * RANKS).all()):
        raise ValueError(f"rank {rank} of a new pair gets a wrong sum over {device}")


def _result(folder: str, case: int, rank: int) -> str:
    return f"{folder}/result {case} of rank {rank}.pt"


def _serve(rank: int, folder: str, device: str, pipe: Connection, log: str) -> None:
    """Run the cases that come through the pipe. An error ends the process, with its traceback."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        from tests.train.megatron import shim

        shim.install()
    import millrace.extras.megatron.engine  # noqa: F401 - before the first deadline

    pipe.send(None)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    while True:
        number, function, args, keys = pipe.recv()
        store = dist.FileStore(f"{folder}/store of case {number}", RANKS)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300)
        )
        try:
            torch.save(function(*args, rank=rank, **keys), _result(folder, number, rank))
            dist.destroy_process_group()
        finally:
            if sys.exc_info()[0] is not None:  # an orderly exit could wait for the other rank
                traceback.print_exc()
                os._exit(1)
        pipe.send(None)
