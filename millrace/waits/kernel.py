"""The system's view of a process: its state, where it waits, and whether its CPU time moves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from millrace.process.trees import children_of
from millrace.waits.answer import Process

SAMPLE_S = 0.15
"""The time over which CPU time is measured."""
_LETTERS = {
    psutil.STATUS_RUNNING: "R",
    psutil.STATUS_SLEEPING: "S",
    psutil.STATUS_DISK_SLEEP: "D",
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "t",
    psutil.STATUS_ZOMBIE: "Z",
    psutil.STATUS_DEAD: "X",
}
"""The states of a process by Linux's letters. Others are kinds of sleep."""


def descendants_of(pids: Sequence[int]) -> dict[int, list[int]]:
    """Return the processes that each of `pids` has started, and theirs, without those in `pids`.

    A process belongs to the nearest of `pids` above it.
    """
    below = {pid: {child.pid for child in children_of(pid)} for pid in pids}
    others = {
        pid: set[int]().union(*(below[one] for one in found & below.keys()))
        for pid, found in below.items()
    }
    return {pid: sorted(found - below.keys() - others[pid]) for pid, found in below.items()}


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of all that it has started."""
    seconds = 0.0
    with suppress(psutil.Error):
        for process in (psutil.Process(pid), *children_of(pid)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system
    return seconds


def moved_mb() -> int:
    """Return the megabytes that this process has read and written. 0 where nobody counts them."""
    with suppress(AttributeError, psutil.Error):
        moved = psutil.Process().io_counters()
        return int(moved.read_chars + moved.write_chars) >> 20
    return 0


def look(pids: Sequence[int]) -> dict[int, Process]:
    """Return what the system says about some processes. One that is gone has the state Z."""
    known: dict[int, psutil.Process] = {}
    for pid in pids:
        with suppress(psutil.Error, ValueError, OverflowError):  # some numbers are no process
            known[pid] = psutil.Process(pid)
            known[pid].cpu_percent()
    time.sleep(SAMPLE_S)
    found = {pid: Process(pid, "Z") for pid in pids}
    for pid, process in known.items():
        waits = ""
        with suppress(OSError):
            waits = Path(f"/proc/{pid}/wchan").read_text().strip().removeprefix("0")
        with suppress(psutil.Error):
            state, share = _LETTERS.get(process.status(), "S"), process.cpu_percent() / 100
            command = " ".join(process.cmdline())[:200]
            found[pid] = Process(pid, state, waits, share, command)
    return found
