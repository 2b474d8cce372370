"""vLLM's worker in a process of its own, under the core and the host of a replica."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from typing import NoReturn

import psutil
import pytest

from millrace.config.serving_checks import HOST_PID

pytestmark = pytest.mark.xdist_group("engines")

WORKER = "millrace.serving.vllm.worker"
CPU_WORKER = "vllm.v1.worker.cpu_worker"


def be_host(answer: int) -> NoReturn:
    """Start a core, which starts a worker. The worker reports the ids of both."""
    with contextlib.suppress(BaseException):
        os.environ[HOST_PID] = str(os.getpid())
        if os.fork() == 0 and os.fork() == 0:
            importlib.import_module(WORKER)
            os.write(answer, f"{os.getppid()} {os.getpid()}".encode())
        os.close(answer)
        time.sleep(60)
    os._exit(1)


def test_a_worker_ends_with_its_host_and_ends_its_core() -> None:
    """The host is killed, so it ends nobody. vLLM imports the worker's module as this test does."""
    assert WORKER not in sys.modules, "the processes below must be the first to import it"
    importlib.import_module(CPU_WORKER)  # a fork of this process stood still in it
    read, write = os.pipe()
    host = os.fork()
    if host == 0:
        be_host(write)
    os.close(write)
    with open(read, "rb") as answers:
        pids = [int(pid) for pid in answers.read().split()]
    under = [psutil.Process(pid) for pid in pids]
    assert len(under) == 2 and under[1].ppid() == under[0].pid and under[0].ppid() == host
    os.kill(host, signal.SIGKILL)
    os.waitpid(host, 0)
    assert not psutil.wait_procs(under, timeout=20)[1]
