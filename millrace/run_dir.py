"""The folder of a run: where it is, and what is already in it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from millrace.config import Config
from millrace.config.recipe import dump, parse
from millrace.errors import CheckpointError, ConfigError, bad_value
from millrace.pipeline.checkpoint import Checkpoints, verify


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run's folder, and the checkpoint that the run goes on from, if any."""

    path: Path
    resume_from: Path | None
    notes: tuple[str, ...] = ()
    """What was passed over on the way to the checkpoint."""
    made: tuple[Path, ...] = ()
    """Folders that were not there before, the run's own first."""

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def discard(self) -> None:
        """Leave nothing of a run that never began: remove what was made for it."""
        release(self.path)
        if self.path in self.made:
            shutil.rmtree(self.path, ignore_errors=True)
        for folder in self.made[1:]:
            with suppress(OSError):  # another run is in it
                folder.rmdir()


def open_run_dir(config: Config, root: Path = Path("runs")) -> RunDir:
    """Find or make the folder. Raises ConfigError where a new run would write over an old one."""
    resume = config.trainer.resume
    path = Path(config.trainer.run_dir) if config.trainer.run_dir else None
    found: Path | None = None
    notes: list[str] = []
    above = _missing(root)
    if resume not in ("never", "auto"):
        found = _checkpoint(resume)
        path = path or found.parent.parent
    elif resume == "auto":
        path, found, notes = _newest(path, root, config.name)
    if found is not None:
        _check_same_problems(config, found)
    made = _missing(path) if path else ()
    if path is None:
        path = _next(root, config.name)
        made = (path, *above)
    if resume == "never" and (path / "history.jsonl").exists():
        raise bad_value(
            "trainer.run_dir",
            str(path),
            "a run is already there",
            "trainer.resume=auto to go on with it, or another folder",
        )
    notes += _lock(path)
    try:
        if not (path / "history.jsonl").exists() and (path / "config.yaml").is_file():
            shutil.rmtree(
                path / "model", ignore_errors=True
            )  # of a run that never began, perhaps with other data
        (path / "logs").mkdir(parents=True, exist_ok=True)
        (path / "config.yaml").write_text(dump(config))
        _take_model(found, path)
    except OSError as error:
        raise _unwritable(path, error) from None
    return RunDir(path, found, tuple(notes), made)


def open_eval_dir(config: Config, root: Path = Path("runs")) -> RunDir:
    """A folder for an evaluation's logs, and the checkpoint that trainer.resume (and trainer.run_dir, for auto) names."""
    resume, found = config.trainer.resume, None
    if resume == "auto":
        run, found, _ = _newest(
            Path(config.trainer.run_dir) if config.trainer.run_dir else None, root, config.name
        )
        if found is None:
            raise bad_value(
                "trainer.run_dir", str(run or ""), "holds no whole checkpoint", "another run folder"
            )
    elif resume not in ("never", "auto"):
        found = _checkpoint(resume)
    above = _missing(root)
    path = _next(root, f"{config.name}-eval")
    (path / "logs").mkdir()
    (path / "config.yaml").write_text(dump(config))
    _take_model(found, path)
    return RunDir(path, found, made=(path, *above))


def _take_model(checkpoint: Path | None, path: Path) -> None:
    """A checkpoint's tokens mean what its own tokenizer says: a folder that goes on from it takes that one."""
    if checkpoint is not None and (checkpoint / "model").is_dir() and not (path / "model").exists():
        shutil.copytree(checkpoint / "model", path / "model")


def _check_same_problems(config: Config, checkpoint: Path) -> None:
    """Prompts are known by their place in the stream: a run goes on with the stream that it began with."""
    before = parse(yaml.safe_load((checkpoint / "config.yaml").read_text()))
    pairs = {
        "trainer.seed": (config.trainer.seed, before.trainer.seed),
        "data.train_files": (config.data.train_files, before.data.train_files),
        "data.shuffle": (config.data.shuffle, before.data.shuffle),
        "rollout.n": (config.rollout.n, before.rollout.n),
        "model.lora_rank": (config.model.lora_rank, before.model.lora_rank),
    }
    if config.model.lora_rank:
        pairs["model.lora_alpha"] = (config.model.lora_alpha, before.model.lora_alpha)
        pairs["model.target_modules"] = (config.model.target_modules, before.model.target_modules)
    for key, (now, then) in pairs.items():
        if now != then:
            raise bad_value(
                key,
                now,
                f"the checkpoint {checkpoint} was made with {then!r}",
                f"{key}={then}, or a new run",
            )
    estimator, before_it = config.algorithm.adv_estimator, before.algorithm.adv_estimator
    if estimator != before_it and {estimator, before_it} & {"remax", "gae"}:
        lacks = "critic" if "gae" in (estimator, before_it) else "greedy response to each prompt"
        has = "a" if before_it in ("gae", "remax") else "no"
        rule = f"the checkpoint {checkpoint} was made with {before_it}: it has {has} {lacks}"
        raise bad_value(
            "algorithm.adv_estimator",
            estimator,
            rule,
            f"algorithm.adv_estimator={before_it}, or a new run",
        )
    if config.needs_reference != before.needs_reference:
        rule = f"the checkpoint {checkpoint} was made {'with' if before.needs_reference else 'without'} a reference policy"
        in_loss = config.actor.use_kl_loss != before.actor.use_kl_loss
        key = "actor.use_kl_loss" if in_loss else "algorithm.use_kl_in_reward"
        raise bad_value(
            key, config.needs_reference, rule, "the KL settings of that run, or a new run"
        )


def _missing(path: Path) -> tuple[Path, ...]:
    """`path` and the folders above it that are not there, from the inside out."""
    return tuple(p for p in (path, *path.parents) if not p.exists())


def _checkpoint(resume: str) -> Path:
    found = Path(resume)
    if not found.is_dir():
        raise bad_value(
            "trainer.resume",
            resume,
            "no such folder",
            "never, auto, or a folder such as RUN/checkpoints/version-000020",
        )
    try:
        verify(found)
    except CheckpointError as error:
        newest = Checkpoints(found, keep=1).newest()[0]  # where it is a run's folder
        fix = (
            f"trainer.resume={newest}"
            if newest
            else "trainer.resume=auto takes the newest whole checkpoint of trainer.run_dir"
        )
        raise bad_value("trainer.resume", resume, str(error), fix) from None
    return found


def _newest(path: Path | None, root: Path, name: str) -> tuple[Path | None, Path | None, list[str]]:
    """The folder to go on in, its newest whole checkpoint, and notes: of `path`, or of the last run that has one."""
    notes: list[str] = []
    for folder in [path] if path else [folder for _, folder in reversed(_runs(root, name))]:
        found, passed = Checkpoints(folder, keep=1).newest()
        notes += [f"passed over a checkpoint: {why}" for why in passed]
        if found is not None:
            return folder, found, notes
        notes.append(
            f"{folder} has no checkpoint" + (": the run begins from its start" if path else "")
        )
    return (
        path,
        None,
        notes
        if path
        else [*notes, f"no run of {name} in {root} has a checkpoint: a new one begins"],
    )


_locks: dict[Path, int] = {}
"""Open files of folders that this process writes to. Closing one gives up the lock."""


def _lock(path: Path) -> list[str]:
    """One process at a time trains in a folder. The kernel gives the lock up when the process ends, however it ends. Returns a note where
    there are no locks.
    """
    if path.resolve() in _locks:
        return []
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = os.read(lock, 200).decode(errors="replace").strip()
        os.close(lock)
        raise bad_value(
            "trainer.run_dir",
            str(path),
            f"{who or 'another run'} is writing here",
            "wait for it, or another folder",
        ) from None
    except OSError as error:
        os.close(lock)
        return [
            f"{path} cannot be locked ({error.strerror}): see to it that no other process trains there"
        ]
    os.truncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    _locks[path.resolve()] = lock
    return []


def release(path: Path) -> None:
    """Another process may train in the folder."""
    if (lock := _locks.pop(path.resolve(), None)) is not None:
        os.close(lock)


def _unwritable(path: Path, error: OSError) -> ConfigError:
    rule = f"cannot be written: {error.strerror or error}"
    return bad_value("trainer.run_dir", str(path), rule, "a folder that can be made or written to")


def _runs(root: Path, name: str) -> list[tuple[int, Path]]:
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    return sorted(
        (int(m[1]), p) for p in root.glob(f"{name}-*") if (m := pattern.fullmatch(p.name))
    )


def _next(root: Path, name: str) -> Path:
    """The next free number; made at once, so that two runs never share one."""
    number = (runs[-1][0] if (runs := _runs(root, name)) else 0) + 1
    while True:
        path = root / f"{name}-{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            rule = f"{path} cannot be made: {error.strerror or error}"
            raise bad_value(
                "trainer.run_dir", "", rule, "trainer.run_dir=FOLDER, one that can be written to"
            ) from None
        else:
            return path
