"""Ownership of folders: millrace deletes and overwrites only in folders that it made."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.errors import ConfigError, DiskError, bad_value

MARKER = ".millrace-run"
locks: dict[Path, int] = {}
"""Open lock files of the folders that this process writes to. To close a file releases its lock."""
_TEXT = "millrace made this folder. It may overwrite and delete what a run writes here.\n"


def is_ours(folder: Path) -> bool:
    """Whether millrace made `folder`."""
    return (folder / MARKER).is_file()


def check(folder: Path, key: str = "trainer.run_dir") -> None:
    """Raise ConfigError if a run would write into a folder with other files. Writes nothing.

    `key` names the folder in the configuration.
    """
    try:
        foreign = folder.is_dir() and not is_ours(folder) and any(folder.iterdir())
    except OSError as error:
        raise unwritable(folder, error, key) from None
    if foreign:
        raise bad_value(
            key,
            str(folder),
            "the folder is not empty, and no run of millrace made it",
            "a new or an empty folder, or none for millrace's own",
        )


def claim(folder: Path, key: str = "trainer.run_dir") -> None:
    """Make `folder` if needed and mark it as millrace's. Raises ConfigError as `check` does."""
    check(folder, key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / MARKER).is_file():
            (folder / MARKER).write_text(_TEXT)
    except OSError as error:
        raise unwritable(folder, error, key) from None


def unwritable(
    path: Path,
    error: OSError,
    key: str = "trainer.run_dir",
    fix: str = "a folder that can be made or written to",
) -> ConfigError:
    """Return the error for a folder or a file that cannot be written."""
    return bad_value(key, str(path), f"cannot be written: {error.strerror or error}", fix)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Let a disk that refuses something in the body raise a DiskError, which names the file.

    The newest whole checkpoint stays as it is.
    """
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"{error.filename or path}: {error.strerror or error}. "
            "Fix: a disk with free space that works, then trainer.resume=auto"
        ) from error


def home_of(checkpoint: Path) -> Path | None:
    """Return the run's folder that contains `checkpoint`. None if it is outside of one."""
    for path in (checkpoint, checkpoint.resolve()):
        if path.parent.name == "checkpoints" and is_ours(path.parent.parent):
            return path.parent.parent
    return None


def remove(path: Path) -> None:
    """Delete a folder of a run. If it is a link, delete the link and keep what it points to."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
