"""Asynchronous RL post-training of language models."""

import sys as _sys
from importlib import import_module as _import_module
from typing import Any as _Any

__version__ = "0.2.0"


def _import_stdlib_first() -> None:
    """Let no file of the current folder, such as math.py, take the place of Python's own modules.

    `python -m` puts this folder first.
    """
    own = next((i for i, path in enumerate(_sys.path) if path.endswith("lib-dynload")), 0)
    _, dash, module = " ".join(_sys.orig_argv).partition(" -m ")
    if dash and module.partition(" ")[0].partition(".")[0] == __name__:
        _sys.path.insert(own, _sys.path.pop(0))


_import_stdlib_first()

_API = ("CallbackError", "DrawnResponse", "LiveVersion", "Rollouts", "Run", "train")


def __getattr__(name: str) -> _Any:
    """Return a name of the Python API. It is imported at its first use."""
    if name in _API:
        return getattr(_import_module("millrace.api"), name)
    raise AttributeError(f"module 'millrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_API]
