"""The processes that a worker starts, such as vLLM's: to find them, and to kill them."""

from __future__ import annotations

import contextlib
import os

import psutil


def group_of(pid: int) -> list[psutil.Process]:
    """Return the processes of the group that a worker leads, such as vLLM's.

    The worker was not waited for yet, so no other process has its number. Python's tracker of
    shared memory is left out: it frees the memory of the others, and then it ends.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == pid and not _is_tracker(process):
                found.append(process)
    return found


def kill_process(pid: int, created: float) -> None:
    """Kill a process on this machine, and those that it started.

    Ray asks an actor to end itself, and a process that stands still does not hear that. Nothing
    happens if another process has the number now: one that was `created` at another time.
    """
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.create_time() != created:
            return
        for one in [*process.children(recursive=True), process]:
            if not _is_tracker(one):
                one.kill()


def _is_tracker(process: psutil.Process) -> bool:
    return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
