"""A slow or failing file system, without FUSE: every Python process of a run imports this.

While the file $CHAOS_ORDERS/disk exists, writes under $CHAOS_RUN raise the errno that it names, or
take the seconds that it names.
"""

import builtins
import errno
import os
import time
from typing import Any

_RUN, _ORDERS = os.environ.get("CHAOS_RUN", ""), os.environ.get("CHAOS_ORDERS", "")


def _trouble(path: Any) -> None:
    if not _RUN or not os.path.exists(f"{_ORDERS}/disk"):
        return
    if not str(path).startswith(_RUN) or "/.waits/" in str(path):
        return
    try:
        with _open(f"{_ORDERS}/disk") as file:
            order = file.read().strip()
    except FileNotFoundError:
        return
    with _open(f"{_ORDERS}/disk-obeyed", "a") as file:
        file.write(f"{order} {path}\n")
    if order[:1].isdigit():
        time.sleep(float(order))
    elif order:
        raise OSError(getattr(errno, order), os.strerror(getattr(errno, order)), str(path))


_open, _fsync, _replace, _rename = builtins.open, os.fsync, os.replace, os.rename


def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    if isinstance(file, (str, os.PathLike)) and set(mode) & set("wax+"):
        _trouble(os.fspath(file))
    return _open(file, mode, *args, **kwargs)


def fsync(fd: Any) -> None:
    number = fd if isinstance(fd, int) else fd.fileno()
    _trouble(os.readlink(f"/proc/self/fd/{number}"))
    _fsync(fd)


def replace(src: Any, dst: Any, **kwargs: Any) -> None:
    _trouble(os.fspath(dst))
    _replace(src, dst, **kwargs)


def rename(src: Any, dst: Any, **kwargs: Any) -> None:
    _trouble(os.fspath(dst))
    _rename(src, dst, **kwargs)


if _RUN:
    builtins.open, os.fsync, os.replace, os.rename = open_, fsync, replace, rename  # type: ignore[assignment]
