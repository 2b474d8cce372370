"""Ranks for the tests: forks of one process that has imported the engines."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.forkserver import ensure_running
from typing import Any

import pytest
import torch.multiprocessing as mp

GROUP = "forkserver"
"""The group of all tests that fork ranks. One worker of pytest runs them, with one fork server."""


def forkserver() -> Any:
    """Start the server, and return the context of processes that start as its forks."""
    multiprocessing.set_forkserver_preload(["tests.train.preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("OMP_NUM_THREADS", "1")
        ensure_running()
    return multiprocessing.get_context("forkserver")


def start_ranks(function: Callable[..., None], args: tuple[Any, ...], ranks: int) -> None:
    """Call `function(rank, *args)` in `ranks` processes, and wait for all of them."""
    forkserver()
    mp.start_processes(function, args=args, nprocs=ranks, start_method="forkserver")
