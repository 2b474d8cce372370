"""The folder of a run: which folder it is, and what it contains."""

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
from millrace.errors import CheckpointError, MillraceError, bad_value
from millrace.persist import ownership
from millrace.pipeline.checkpoint import Checkpoints, read_manifest, verify
from millrace.process.files import replace_file
from millrace.run import resume_checks, supervised
from millrace.run.mirror import Store, fetch, open_store, unusable

_FROM_THE_BEGINNING = ("so the run starts from the beginning", "so a new run starts")


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run's folder, and the checkpoint that the run resumes from, if any."""

    path: Path
    resume_from: Path | None
    notes: tuple[str, ...] = ()
    """Messages for the user, such as damaged checkpoints that were skipped."""
    made: tuple[Path, ...] = ()
    """Folders that this run made. The run's own folder comes first."""
    store: Store | None = None
    """The place of trainer.mirror."""

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def discard(self) -> None:
        """Remove everything that was made for a run that never began."""
        release(self.path)
        if self.path in self.made:
            shutil.rmtree(self.path, ignore_errors=True)
        for folder in self.made[1:]:
            with suppress(OSError):  # another run uses it
                folder.rmdir()


def find_run(
    config: Config, root: Path = Path("runs")
) -> tuple[Path | None, Path | None, list[str]]:
    """Return the folder of a run, the checkpoint that it resumes from, and notes. Change nothing.

    None is a new folder, or no checkpoint. Raises ConfigError for what a resume refuses, and if a
    new run would overwrite another run.
    """
    resume = config.trainer.resume
    path = Path(config.trainer.run_dir) if config.trainer.run_dir else None
    checkpoint: Path | None = None
    notes: list[str] = []
    if resume not in ("never", "auto"):
        checkpoint = _checkpoint(resume)
        path = path or ownership.home_of(checkpoint)
    elif resume == "auto":
        if path is not None:
            ownership.check(path)
        path, checkpoint, notes = _newest(path, root, config.name)
    if checkpoint is not None:
        notes += resume_checks.check(config, checkpoint)
    if path is not None:
        _check_new(resume, config.model.path, path)
    return path, checkpoint, notes


def open_run_dir(config: Config, root: Path = Path("runs")) -> RunDir:
    """Find or make the folder of a run. Raises ConfigError as `find_run` does."""
    resume, missing_parents = config.trainer.resume, _missing(root)
    path, checkpoint, notes = find_run(config, root)
    store = open_store(config.trainer, path, checkpoint)
    made = _missing(path) if path else ()
    if path is None:
        path = _next(root, config.name)
        made = (path, *missing_parents)
        if checkpoint is not None:
            notes.append(
                f"{checkpoint} is not in the folder of its run, so this run writes to {path}. "
                "Set trainer.run_dir=FOLDER for another folder"
            )
    ownership.claim(path)
    notes += _lock(path)
    supervised.send_status(supervised.DriverStatus(run=str(path)))
    if store is not None:
        try:
            before = checkpoint
            checkpoint, told = _mirrored(store, path, checkpoint, auto=resume == "auto")
            if before is None and checkpoint is not None:
                notes = [n for n in notes if not n.endswith(_FROM_THE_BEGINNING)]
            if told and checkpoint is not None:
                more = resume_checks.check(config, checkpoint)
                notes += [note for note in more if note not in notes]
        except MillraceError:
            RunDir(path, None, made=made).discard()
            raise
        notes += told
    try:
        if not (path / "history.jsonl").exists():  # no run began: its model may be stale
            ownership.remove(path / "model")
        _fill(path, dump(config), checkpoint)
    except OSError as error:
        raise ownership.unwritable(path, error) from None
    return RunDir(path, checkpoint, tuple(notes), made, store)


def _mirrored(
    store: Store, path: Path, checkpoint: Path | None, *, auto: bool
) -> tuple[Path | None, list[str]]:
    """Take the place of trainer.mirror for this run, and a newer checkpoint from there."""
    try:
        store.claim(path)
    except Exception as error:
        raise unusable(store.address, error) from error
    if not auto:
        return checkpoint, []
    after = -1 if checkpoint is None else read_manifest(checkpoint).version
    fetched, notes = fetch(store, path, after)
    return fetched or checkpoint, notes


def _check_new(resume: str, given: str, path: Path) -> None:
    """Raise ConfigError if the run would overwrite another run, or the `given` model."""
    if resume == "never" and os.path.exists(path / "history.jsonl"):
        raise bad_value(
            "trainer.run_dir",
            str(path),
            "the folder already has a run",
            "trainer.resume=auto to resume it, or another folder",
        )
    ownership.check(path)
    if given and os.path.exists(given) and Path(given).resolve() == (path / "model").resolve():
        rule = f"is the run's own model folder in trainer.run_dir = {str(path)!r}"
        raise bad_value("model.path", given, rule, "another trainer.run_dir")


def open_eval_dir(config: Config, root: Path = Path("runs")) -> RunDir:
    """Make a folder for the logs of an evaluation, and find the checkpoint to evaluate.

    trainer.resume names the checkpoint. With auto, trainer.run_dir names the run.
    """
    resume, run_dir, checkpoint = config.trainer.resume, config.trainer.run_dir, None
    notes: list[str] = []
    if resume == "auto":
        run, checkpoint, notes = _newest(Path(run_dir) if run_dir else None, root, config.name)
        if checkpoint is None:
            if run is None:
                rule = f"no run of {config.name} in {root} has a whole checkpoint"
                raise bad_value("trainer.resume", resume, rule, "trainer.run_dir=RUN names the run")
            raise bad_value(
                "trainer.run_dir", str(run), "has no whole checkpoint", "another run folder"
            )
    elif resume not in ("never", "auto"):
        checkpoint = _checkpoint(resume)
    missing_parents = _missing(root)
    path = _next(root, f"{config.name}-eval")
    if run_dir and resume != "auto":
        notes.append(
            f"trainer.run_dir = {run_dir!r} has no effect: an evaluation writes to {path}. "
            "trainer.resume=auto validates the newest checkpoint of that run"
        )
    ownership.claim(path)
    _fill(path, dump(config), checkpoint)
    return RunDir(path, checkpoint, tuple(notes), (path, *missing_parents))


def _fill(path: Path, config: str, checkpoint: Path | None) -> None:
    """Write the configuration, and copy the checkpoint's model folder.

    Its tokens have meaning only with its own tokenizer.
    """
    (path / "logs").mkdir(parents=True, exist_ok=True)
    replace_file(path / "config.yaml", config)
    if checkpoint is not None and (checkpoint / "model").is_dir() and not (path / "model").exists():
        shutil.copytree(checkpoint / "model", path / "model")


def _missing(path: Path) -> tuple[Path, ...]:
    """Return `path` and its parents that do not exist, from the inside out."""
    return tuple(p for p in (path, *path.parents) if not p.exists())


def _checkpoint(resume: str) -> Path:
    """Return the folder of the checkpoint `resume`. Raises ConfigError if it is incomplete."""
    checkpoint = Path(resume)
    if not os.path.isdir(checkpoint):  # Path.is_dir raises if a folder above cannot be entered
        raise bad_value(
            "trainer.resume",
            resume,
            "no such folder",
            "never, auto, or a folder such as RUN/checkpoints/version-000020",
        )
    try:
        verify(checkpoint)
    except CheckpointError as error:
        newest = Checkpoints(checkpoint, keep=1).newest()[0]  # if it is a run's folder
        fix = (
            f"trainer.resume={newest}"
            if newest
            else "trainer.resume=auto takes the newest whole checkpoint of trainer.run_dir"
        )
        raise bad_value("trainer.resume", resume, str(error), fix) from None
    return checkpoint


def _newest(path: Path | None, root: Path, name: str) -> tuple[Path | None, Path | None, list[str]]:
    """Return the folder to resume in, its newest whole checkpoint, and notes.

    Without `path`, this is the newest run of `name` that has a checkpoint.
    """
    notes: list[str] = []
    for folder in [path] if path else [folder for _, folder in reversed(_runs(root, name))]:
        checkpoint, damaged = Checkpoints(folder, keep=1).newest()
        notes += [f"skipped a damaged checkpoint: {why}" for why in damaged]
        if checkpoint is not None:
            return folder, checkpoint, notes
        notes.append(
            f"{folder} has no checkpoint"
            + (", so the run starts from the beginning" if path else "")
        )
    return (
        path,
        None,
        notes
        if path
        else [*notes, f"no run of {name} in {root} has a checkpoint, so a new run starts"],
    )


def _lock(path: Path) -> list[str]:
    """Lock the folder, so that only one process trains in it.

    The kernel releases the lock when the process ends, for whatever reason. Returns a note if the
    file system has no locks. Raises ConfigError if another process has the lock.
    """
    if path.resolve() in ownership.locks:
        return []
    try:
        lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise ownership.unwritable(path, error) from None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 200).decode(errors="replace").strip()
        os.close(lock)
        raise bad_value(
            "trainer.run_dir",
            str(path),
            f"{owner or 'another run'} is writing to this folder",
            "wait until it ends, or use another folder",
        ) from None
    except OSError as error:
        os.close(lock)
        return [
            f"{path} cannot be locked ({error.strerror}). "
            "Make sure that no other process trains in it"
        ]
    os.truncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    ownership.locks[path.resolve()] = lock
    return []


def release(path: Path) -> None:
    """Release the lock, so that another process may train in the folder."""
    if (lock := ownership.locks.pop(path.resolve(), None)) is not None:
        os.close(lock)


def _runs(root: Path, name: str) -> list[tuple[int, Path]]:
    """Return (number, folder) of every run of `name` under `root`, in order."""
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    return sorted(
        (int(m[1]), p) for p in root.glob(f"{name}-*") if (m := pattern.fullmatch(p.name))
    )


def _next(root: Path, name: str) -> Path:
    """Make the folder of the next free number.

    It is made at once, so that two runs never share one.
    """
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
