"""Folders for files of running processes. What a killed owner leaves, the next start removes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "millrace-"
MARKER = ".millrace-scratch"
"""A file that the owner of a folder has locked. The lock ends with the owner."""


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A folder that this process owns. Before, those without a living owner are removed."""

    def __init__(self, parent: str) -> None:
        remove_stale(parent)
        super().__init__(prefix=PREFIX, dir=parent)
        new = Path(self.name, f"{MARKER}.new")
        self._lock = new.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(Path(self.name, MARKER))  # it is locked as soon as others see it

    def cleanup(self) -> None:
        super().cleanup()
        self._lock.close()


def remove_stale(parent: str) -> None:
    """Remove the folders that millrace made in `parent` for this user, and whose owner is gone."""
    for marker in Path(parent).glob(f"{PREFIX}*/{MARKER}"):
        folder = marker.parent
        with contextlib.suppress(OSError):  # it has an owner, or another process removes it
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with open(os.open(marker, os.O_RDWR | os.O_NOFOLLOW), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
