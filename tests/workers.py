"""The workers of a run, found as processes."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import psutil

from millrace.config import Config, Sides


def without_engine() -> Sides:
    """Return sides whose fork server imports nothing, because it finds no such engine.

    Its workers answer a ping after 0.3 s and not after 3.5 s.
    """
    sides = Config().sides
    return replace(sides, trainer=sides.trainer.model_copy(update={"engine": "none"}))


def workers_of(pid: int | None = None) -> dict[str, psutil.Process]:
    """Return the local workers under a process, by name. The default is this process."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            ended = process.status() == psutil.STATUS_ZOMBIE
            if re.fullmatch(r"(trainer|rollout)-\d+", process.name()) and not ended:
                found[process.name()] = process
    return found
