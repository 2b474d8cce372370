"""The workers of a run, found as processes."""

from __future__ import annotations

import contextlib
import re

import psutil


def workers_of(pid: int | None = None) -> dict[str, psutil.Process]:
    """Return the local workers under a process, by name. The default is this process."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            ended = process.status() == psutil.STATUS_ZOMBIE
            if re.fullmatch(r"(trainer|rollout)-\d+", process.name()) and not ended:
                found[process.name()] = process
    return found
