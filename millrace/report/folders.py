"""The folders of a run that this room writes: who may write there, and how much is in them."""

from __future__ import annotations

import re
from pathlib import Path


def own(folder: Path) -> Path:
    """Return `folder`, and make it if needed. A link in its place is replaced and not followed.

    Raise OSError if another file has its name.
    """
    if folder.is_symlink():
        folder.unlink()
    folder.mkdir(exist_ok=True)
    return folder


def files(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """Return the regular files of `folder` with such a name, by name. A link is not followed."""
    try:
        if folder.is_symlink():
            return []
        found = [p for p in folder.iterdir() if name.fullmatch(p.name)]
        return sorted(p for p in found if p.is_file() and not p.is_symlink())
    except OSError:
        return []


def size(paths: list[Path]) -> int:
    """Return the bytes of all of `paths` that still exist."""
    total = 0
    for path in paths:
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total
