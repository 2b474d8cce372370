"""Fits the costs of finished runs: every version of every run is one equation."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
import psutil

from millrace.config import ModelConfig, RolloutConfig, TrainerConfig
from millrace.errors import bad_value
from millrace.extras.plan.costs import (
    COLOCATED,
    SEPARATE,
    Costs,
    Term,
    constant,
    decode_term,
    fit,
)
from millrace.persist.accounts import Line
from millrace.persist.run_reader import RunReader
from millrace.run.machine import NVIDIA

LEAST = 10
"""Versions that a run needs at least: with fewer, no version can be held out."""
FIRST = 2
"""Versions at the start of a run that do not count: kernels and caches warm up."""
SWITCHES = 4
"""Sleeps and wakes of a hand-over: both sides fall asleep once, and wake once."""
QUANTILES = ((0.0, "min"), (0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (1.0, "max"))

TRAINS = ("optimizer_step", "token", "row", "version")


@dataclass
class _Versions:
    """The equations of one placement."""

    train: list[tuple[float, ...]] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)
    loads: list[list[tuple[float, float]]] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)
    switch: list[float] = field(default_factory=list)


def machine_here() -> tuple[str, int]:
    """Return the name of this kind of machine, and the bytes of one of its devices."""
    if NVIDIA.exists():
        import torch

        if torch.cuda.is_available():
            about = torch.cuda.get_device_properties(0)
            return about.name, about.total_memory
    cores = os.cpu_count() or 1
    kind = platform.processor() or platform.machine()
    return f"CPU {kind}, {cores} cores", psutil.virtual_memory().total


def identity(model: ModelConfig, rollout: RolloutConfig, trainer: TrainerConfig) -> tuple[str, str]:
    """Return the names of the model and of the engines, which costs belong to."""
    shape = model.shape
    name = model.path or f"{shape.num_hidden_layers} layers of {shape.hidden_size}"
    if model.lora_rank:
        name += f", LoRA {model.lora_rank}"
    engine = f"{rollout.engine} on {rollout.tensor_model_parallel_size}, {trainer.engine}"
    return f"{name}, {model.dtype}", engine


def calibrate(folders: Sequence[Path], machine: str, device_bytes: int) -> Costs:
    """Return the costs that explain the versions of these runs best.

    Raises ConfigError if a folder has no accounts of enough versions, or if runs have different
    models or engines.
    """
    placements: dict[str, _Versions] = {}
    about: tuple[str, str] | None = None
    rewards, rows = list[float](), list[Mapping[str, float]]()
    for folder in folders:
        run = _read(folder)
        assert run.config is not None
        found = identity(run.config.model, run.config.rollout, run.config.trainer)
        if about is not None and found != about:
            rule = f"is a run of {' on '.join(found)}, and the first one is of {' on '.join(about)}"
            raise bad_value("RUN_FOLDER", str(folder), rule, "one calibration for each")
        about = found
        rows += _add(run, placements, rewards)
    assert about is not None
    if len(placements) == 2 and not any(_share_cores(folder) for folder in folders):
        # Devices are alike: a step costs the same in any placement.
        one, other = placements.values()
        for name in ("train", "train_s", "loads", "tokens", "reads"):
            both = [*getattr(one, name), *getattr(other, name)]
            setattr(one, name, both)
            setattr(other, name, both)
    colocated = placements.get(COLOCATED)
    return Costs(
        machine=machine,
        model=about[0],
        engine=about[1],
        runs=[folder.resolve().name for folder in folders],
        decode={p: _decode(v) for p, v in placements.items()},
        train={
            p: fit(TRAINS, np.array(v.train), np.array(v.train_s)) for p, v in placements.items()
        },
        transfer={p: constant(v.transfer) for p, v in placements.items()},
        pause={p: constant(v.pause) for p, v in placements.items()},
        switch=constant(colocated.switch if colocated else []),
        reward=constant(rewards),
        lengths=_lengths(rows),
        prompt=fmean(row.get("prompt_length/mean", 1.0) for row in rows),
        device_bytes=device_bytes,
    )


def _read(folder: Path) -> RunReader:
    run = RunReader(folder).read()
    fix = "a folder such as runs/quickstart-1, of a run that is complete"
    if not folder.is_dir():
        raise bad_value("RUN_FOLDER", str(folder), "no such folder", fix)
    if run.config is None or not run.accounts:
        rule = "has no accounts or no readable configuration, so its costs are not known"
        raise bad_value("RUN_FOLDER", str(folder), rule, fix)
    if len(run.rows) < LEAST + FIRST:
        rule = f"has {len(run.rows)} versions, and {LEAST + FIRST} are the fewest that show costs"
        raise bad_value("RUN_FOLDER", str(folder), rule, "a longer run")
    return run


def _share_cores(folder: Path) -> bool:
    return RunReader(folder).read().accounts[-1].share_cores


def _add(
    run: RunReader, placements: dict[str, _Versions], rewards: list[float]
) -> list[Mapping[str, float]]:
    """Add the versions of the newest attempt, and return their rows."""
    assert run.config is not None
    config, used = run.config, list[Mapping[str, float]]()
    colocated, ranks = config.schedule.colocated, config.trainer.ranks
    into = placements.setdefault(COLOCATED if colocated else SEPARATE, _Versions())
    for before, after in list(itertools.pairwise(run.attempt))[FIRST:]:
        row = run.rows.get(after.version)
        if row is None or after.version != before.version + 1 or "timing_s/train" not in row:
            continue
        seconds, samples = row["perf/time_per_version"], row["train/samples"]
        loads = _loads(before, after)
        drawn = row.get("rollouter/tokens_per_s", 0.0) * seconds
        used.append(row)
        steps, tokens = row["train/optimizer_steps"], row["train/tokens"]
        into.train.append((steps, tokens / ranks, samples * config.rollout.n / ranks, 1.0))
        into.train_s.append(row["timing_s/train"] + row.get("timing_s/other", 0.0))
        if loads and drawn > 1:
            into.loads.append(loads)
            into.tokens.append(drawn)
            into.reads.append(row.get("rollouter/prefill_tokens_per_s", 0.0) * seconds)
        into.transfer.append(row.get("timing_s/sync_transfer", 0.0))
        into.pause.append(row.get("timing_s/sync_activate", 0.0))
        into.switch.append(row.get("timing_s/switch", 0.0) / SWITCHES)
        if calls := after.scores.count - before.scores.count:
            rewards.append((after.scores.seconds - before.scores.seconds) / calls)
    return used


def _loads(before: Line, after: Line) -> list[tuple[float, float]]:
    """Return the seconds of each bin of loads in a version, with its mean load."""
    bins = []
    for name, (seconds, integral) in after.loads.items():
        since = before.loads.get(name, (0.0, 0.0))
        if seconds - since[0] > 1e-9 and integral > since[1]:
            spent = seconds - since[0]
            bins.append((spent, (integral - since[1]) / spent))
    return bins


def _decode(versions: _Versions) -> Term:
    return decode_term(versions.loads, np.array(versions.tokens), np.array(versions.reads))


def _lengths(rows: Sequence[Mapping[str, float]]) -> list[tuple[float, float]]:
    """Return the mean of each quantile over the versions, none smaller than the one before."""
    found = [
        fmean(row[f"response_length/{name}"] for row in rows if f"response_length/{name}" in row)
        for _, name in QUANTILES
    ]
    highest = itertools.accumulate(found, max)
    return [
        (share, max(1.0, length)) for (share, _), length in zip(QUANTILES, highest, strict=True)
    ]
