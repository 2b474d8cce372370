"""Files that are there as a whole or not at all, for other processes and after a crash."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(
    path: Path, data: str | bytes, *, durable: bool = False, private: bool = False, by: str = "new"
) -> None:
    """Write a file as a whole. A link in its place is replaced and not followed.

    A `durable` file is on the disk at the return. Only the user may read a `private` one. Writers
    that write the same file at once are told apart by `by`.
    """
    new = path.with_name(f".{path.name}.{by}")
    new.unlink(missing_ok=True)
    if private:
        new.touch(0o600, exist_ok=False)
    new.write_bytes(data.encode() if isinstance(data, str) else data)
    if durable:
        sync(new)
    new.replace(path)
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file is on the disk, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
