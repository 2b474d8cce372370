"""The workers of a run, found as processes."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

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


def keys_of(engine: str) -> list[str]:
    """Return the keys of replicas with an engine, in its environment. Skip the test without it."""
    if engine == "torch":
        return []
    python = Path(__file__).parents[1] / f".venv-{engine}/bin/python"
    if not python.exists():
        pytest.skip(f"no {python}: make sglang, make test-vllm")
    heads = ["model.shape.num_attention_heads=2", "model.shape.num_key_value_heads=1"]
    return [f"rollout.engine={engine}", f"rollout.python={python}", *heads]


def cores_of(worker: psutil.Process) -> list[psutil.Process]:
    """Return the processes of a serving engine that have the model, under its worker."""
    children = worker.children(recursive=True)
    return [p for p in children if p.name().startswith(("sglang::sch", "VLLM::"))]
