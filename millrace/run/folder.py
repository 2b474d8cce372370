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

from millrace.config import Config
from millrace.config.recipe import dump
from millrace.errors import CheckpointError, bad_value
from millrace.pipeline import ownership
from millrace.pipeline.checkpoint import Checkpoints, verify
from millrace.run import resume_checks


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
        path = path or ownership.home_of(found)
    elif resume == "auto":
        if path is not None:
            ownership.check(path)
        path, found, notes = _newest(path, root, config.name)
    if found is not None:
        notes += resume_checks.check(config, found)
    if path is not None:
        _check_new(config, path)
    made = _missing(path) if path else ()
    if path is None:
        path = _next(root, config.name)
        made = (path, *above)
        if found is not None:
            notes.append(
                f"{found} is not in the folder of its run: this run goes on in {path}. "
                "trainer.run_dir=FOLDER names another folder"
            )
    ownership.claim(path)
    notes += _lock(path)
    try:
        if not (path / "history.jsonl").exists():  # the run never began: its data may be other data
            ownership.remove(path / "model")
        (path / "logs").mkdir(parents=True, exist_ok=True)
        ownership.replace_text(path / "config.yaml", dump(config))
        _take_model(found, path)
    except OSError as error:
        raise ownership.unwritable(path, error) from None
    return RunDir(path, found, tuple(notes), made)


def _check_new(config: Config, path: Path) -> None:
    """Raise ConfigError if the run would write over another run, or over a user's files."""
    if config.trainer.resume == "never" and os.path.exists(path / "history.jsonl"):
        raise bad_value(
            "trainer.run_dir",
            str(path),
            "a run is already there",
            "trainer.resume=auto to go on with it, or another folder",
        )
    ownership.check(path)
    model = Path(config.model.path)
    if config.model.path and model.exists() and model.resolve() == (path / "model").resolve():
        rule = f"is the run's own model folder in trainer.run_dir = {str(path)!r}"
        raise bad_value("model.path", config.model.path, rule, "another trainer.run_dir")


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
    ownership.claim(path)
    (path / "logs").mkdir()
    ownership.replace_text(path / "config.yaml", dump(config))
    _take_model(found, path)
    return RunDir(path, found, made=(path, *above))


def _take_model(checkpoint: Path | None, path: Path) -> None:
    """A checkpoint's tokens mean what its own tokenizer says: a folder that goes on from it takes that one."""
    if checkpoint is not None and (checkpoint / "model").is_dir() and not (path / "model").exists():
        shutil.copytree(checkpoint / "model", path / "model")


def _missing(path: Path) -> tuple[Path, ...]:
    """`path` and the folders above it that are not there, from the inside out."""
    return tuple(p for p in (path, *path.parents) if not p.exists())


def _checkpoint(resume: str) -> Path:
    found = Path(resume)
    if not os.path.isdir(found):  # Path.is_dir raises where a folder above cannot be entered
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
        lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise ownership.unwritable(path, error) from None
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
