"""Fits the costs of finished runs: every version of every run is one equation."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

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
from millrace.report.accounts import WAIT
from millrace.run.machine import NVIDIA
from millrace.schedule.steady import counted

LEAST = 10
"""Versions that a run needs at least: with fewer, no version can be held out."""
FIX = "a folder such as runs/quickstart-1, of a run that is complete"
FIRST = 2
"""Versions at the start of a run that do not count: kernels and caches warm up."""
SWITCHES = 4
"""Sleeps and wakes of a hand-over: both sides fall asleep once, and wake once."""
QUANTILES = ((0.0, "min"), (0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (1.0, "max"))
WALL = "perf/time_per_version"

TRAINS = ("optimizer_step", "token", "row", "version")


class _Version(NamedTuple):
    """The equations of one version."""

    row: Mapping[str, float]
    train: tuple[float, ...]
    """What its seconds of training grow with: TRAINS."""
    loads: list[tuple[float, float, bool]]
    responses: int

    def total(self, name: str) -> float:
        """Return a figure per second times the seconds of the version."""
        return self.row.get(name, 0.0) * self.row[WALL]


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


def calibrate(
    runs: Sequence[RunReader],
    machine: str = "",
    device_bytes: int = 0,
    *,
    newest: int | None = None,
    likely: int = 0,
) -> Costs:
    """Return the costs that explain the versions of these runs best, or the `newest` of each.

    With `likely` of -1 or 1, they are those of an end of what is likely: a decode step that grows
    least with its requests and a train step that no further rank shortens, or the opposite.

    Raises ConfigError if a run has no accounts of enough versions, or if runs have different models
    or engines.
    """
    placements: dict[str, list[_Version]] = {}
    about: tuple[str, str] | None = None
    rewards = list[float]()
    for run in runs:
        if run.config is None or not run.attempt:
            rule = "has no accounts or no readable configuration, so its costs are not known"
            raise bad_value("RUN_FOLDER", str(run.path), rule, FIX)
        found = identity(run.config.model, run.config.rollout, run.config.trainer)
        if about is not None and found != about:
            rule = f"is a run of {' on '.join(found)}, and the first one is of {' on '.join(about)}"
            raise bad_value("RUN_FOLDER", str(run.path), rule, "one calibration for each")
        about = found
        name = COLOCATED if run.config.schedule.colocated else SEPARATE
        placements.setdefault(name, []).extend(_versions(run, rewards, newest))
    assert about is not None
    rows = [version.row for versions in placements.values() for version in versions]
    alike: Mapping[str, Sequence[_Version]] = placements
    share_cores = any(run.attempt[-1].share_cores for run in runs)
    if len(placements) == 2 and not share_cores:
        # Devices are alike: a step costs the same in any placement.
        alike = dict.fromkeys(placements, tuple(itertools.chain(*placements.values())))
    return Costs(
        machine=machine,
        model=about[0],
        engine=about[1],
        runs=[run.path.resolve().name for run in runs],
        decode={p: _decode(versions, likely, not share_cores) for p, versions in alike.items()},
        train={p: _train(versions, likely) for p, versions in alike.items()},
        transfer={p: _part(v, "sync_transfer") for p, v in placements.items()},
        pause={p: _part(v, "sync_activate") for p, v in placements.items()},
        switch=_part(placements.get(COLOCATED, []), "switch", SWITCHES),
        reward=constant(rewards),
        lengths=_lengths(rows),
        prompt=fmean(row.get("prompt_length/mean", 1.0) for row in rows),
        device_bytes=device_bytes,
    )


def read(folder: Path) -> RunReader:
    """Return a run. Raises ConfigError without its folder."""
    if not folder.is_dir():
        raise bad_value("RUN_FOLDER", str(folder), "no such folder", FIX)
    return RunReader(folder).read()


def _versions(run: RunReader, rewards: list[float], newest: int | None) -> list[_Version]:
    """Return the versions of the newest attempt. Their seconds of a score are added to `rewards`.

    Raises ConfigError if they are too few.
    """
    assert run.config is not None
    ranks, n, found = run.config.trainer.ranks, run.config.rollout.n, list[_Version]()
    for before, after in list(itertools.pairwise(run.attempt))[FIRST:][-(newest or 0) :]:
        row = run.rows.get(after.version)
        if row is None or after.version != before.version + 1 or "timing_s/train" not in row:
            continue
        loads = _loads(before, after)
        if not loads or row.get("rollouter/tokens_per_s", 0.0) * row[WALL] <= 1:
            continue
        if calls := after.scores.count - before.scores.count:
            rewards.append((after.scores.seconds - before.scores.seconds) / calls)
        steps, tokens = row["train/optimizer_steps"], row["train/tokens"]
        rows = row["train/samples"] * n
        explains = steps, tokens / ranks, rows / ranks, 1.0
        responses = after.requests.count - before.requests.count
        found.append(_Version(row, explains, loads, responses))
    if len(found) < LEAST:
        rule = (
            f"has {len(found)} whole versions after its first {FIRST}, and {LEAST} are the fewest"
        )
        raise bad_value("RUN_FOLDER", str(run.path), rule, "a longer run")
    return found


def steady(run: RunReader) -> Sequence[Mapping[str, float]]:
    """Return the rows of the newest attempt in which the pipeline neither fills nor drains.

    An attempt that runs does not drain yet.
    """
    assert run.config is not None
    schedule, start, last = run.config.schedule, run.attempt[0].version, run.attempt[-1]
    rows = [row for version, row in sorted(run.rows.items()) if version > start]
    drained = last.samples and not sum(last.samples.values())
    samples = int(sum(row["train/samples"] for row in rows))
    steps = counted(samples + (0 if drained else schedule.capacity), 1, schedule)
    return rows[steps.start : steps.stop]


def _loads(before: Line, after: Line) -> list[tuple[float, float, bool]]:
    """Return the seconds of each bin of loads in a version, its mean load, and whether others wait."""
    bins = []
    for name, (seconds, integral) in after.loads.items():
        since = before.loads.get(name, (0.0, 0.0))
        if seconds - since[0] > 1e-9 and integral > since[1]:
            spent = seconds - since[0]
            bins.append((spent, (integral - since[1]) / spent, name == WAIT))
    return bins


def _train(versions: Sequence[_Version], likely: int) -> Term:
    seconds = [v.row["timing_s/train"] + v.row.get("timing_s/other", 0.0) for v in versions]
    shown = {-1: (1, 1, 0, 1), 0: (1, 1, 1, 1), 1: (0, 1, 1, 0)}[likely]
    return fit(TRAINS, np.array([v.train for v in versions]) * shown, np.array(seconds), True)


def _part(versions: Sequence[_Version], name: str, times: int = 1) -> Term:
    return constant([v.row.get(f"timing_s/{name}", 0.0) / times for v in versions])


def _decode(versions: Sequence[_Version], likely: int, waits: bool) -> Term:
    """Return the costs of an engine. Where cores are shared, other work explains what waiting does."""
    tokens, reads = (
        np.array([v.total(f"rollouter/{name}_per_s") for v in versions])
        for name in ("tokens", "prefill_tokens")
    )
    responses = np.array([float(v.responses) for v in versions])
    loads = [v.loads for v in versions]
    return decode_term(loads, tokens, reads, responses, likely, waits=waits)


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
