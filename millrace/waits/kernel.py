"""The kernel's view of a process: its state, where it waits, and whether its CPU time moves."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from millrace.waits.answer import Process

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
SAMPLE_S = 0.15
"""The time over which CPU time is measured."""


def _stat(pid: int) -> tuple[str, float, int] | None:
    """Return the state, the CPU seconds and the parent of a process. None if it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[1])


def _read(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def descendants_of(pids: Sequence[int]) -> dict[int, list[int]]:
    """Return the processes that each of `pids` has started, and theirs, without those in `pids`.

    A process belongs to the nearest of `pids` above it.
    """
    parents: dict[int, int] = {}
    for folder in _PROC.glob("[0-9]*"):
        if (stat := _stat(int(folder.name))) is not None:
            parents[int(folder.name)] = stat[2]
    found: dict[int, list[int]] = {pid: [] for pid in pids}
    for pid in parents:
        above = parents.get(pid, 0)
        while above and above not in found:
            above = parents.get(above, 0)
        if above in found and pid not in found:
            found[above].append(pid)
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of all that it has started."""
    whole = [pid, *descendants_of([pid])[pid]]
    return sum(stat[1] for p in whole if (stat := _stat(p)) is not None)


def moved_mb() -> int:
    """Return the megabytes that this process has read and written."""
    lines = _read(_PROC / "self" / "io").split()
    values = dict(zip(lines[::2], lines[1::2], strict=False))
    return (int(values.get("rchar:", 0)) + int(values.get("wchar:", 0))) >> 20


def look(pids: Sequence[int]) -> dict[int, Process]:
    """Return what the kernel says about some processes. One that is gone has the state Z."""
    before = {pid: _stat(pid) for pid in pids}
    start = time.monotonic()
    time.sleep(SAMPLE_S)
    seconds = time.monotonic() - start
    found = {}
    for pid in pids:
        old, new = before[pid], _stat(pid)
        if old is None or new is None:
            found[pid] = Process(pid, "Z")
            continue
        folder = _PROC / str(pid)
        found[pid] = Process(
            pid,
            new[0],
            _read(folder / "wchan").removeprefix("0"),
            max(0.0, (new[1] - old[1]) / seconds),
            _read(folder / "cmdline")[:200],
        )
    return found
