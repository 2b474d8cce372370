"""Processes that a process has started: they are found, killed and waited for."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable

import psutil


def group_of(pid: int) -> list[psutil.Process]:
    """Return the processes of the group that a worker leads, such as vLLM's.

    The worker was not waited for yet, so no other process has its number. Python's tracker of
    shared memory is left out: it frees the memory of the others, and then it ends.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == pid and not is_tracker(process):
                found.append(process)
    return found


def children_of(pid: int) -> list[psutil.Process]:
    """Return the processes below a process, such as vLLM's below a worker."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_all(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def kill_process(pid: int, created: float) -> None:
    """Kill a process on this machine, and those that it started.

    Ray asks an actor to end itself, and a process that stands still does not hear that. Nothing
    happens if another process has the number now: one that was `created` at another time.
    """
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.create_time() == created:
            kill_all(one for one in [*children_of(pid), process] if not is_tracker(one))


def lives(process: psutil.Process) -> bool:
    """Whether a process runs. A zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def wait_until(ended: Callable[[], bool], limit_s: float, poll_s: float = 0.01) -> bool:
    """Wait until processes have ended, at most `limit_s` seconds. Return whether they have.

    A process whose GPU has failed may never end.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + limit_s
    while not (over := ended()) and clock() < end:  # noqa: ASYNC110 - no event says it
        await asyncio.sleep(poll_s)
    return over


def is_tracker(process: psutil.Process) -> bool:
    """Whether a process is Python's tracker of shared memory. One that has ended is none."""
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False
