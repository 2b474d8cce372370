"""RUN/config.yaml as a tree. The folder may come from somebody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from millrace.observe.files import open_regular

LARGEST = 1 << 22
"""Bytes of the largest file that is read."""
_NODES = 200_000
"""The most values of a tree. References let a small file have more."""
_DEPTH = 40


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the configuration of a run. Raises OSError or ValueError if it cannot be read."""
    path = run_dir / "config.yaml"
    if path.is_symlink():  # a report would show whatever file it leads to
        raise ValueError("it is a link")
    with open_regular(path) as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError("the file is too large")
    try:
        tree = yaml.safe_load(text.decode(errors="replace"))
    except (yaml.YAMLError, RecursionError, OverflowError, TypeError, AttributeError) as error:
        raise ValueError(type(error).__name__) from error
    if not isinstance(tree, dict):
        raise ValueError("not a configuration")
    _check(tree)
    return tree


def _check(tree: Any) -> None:
    """Raise ValueError if a tree has too many values, is too deep, or has a key that is no text."""
    left, waiting = _NODES, [(tree, 0)]
    while waiting:
        value, depth = waiting.pop()
        left -= 1
        if left < 0 or depth > _DEPTH:
            raise ValueError("it has too many values")
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise ValueError("it has a key that is no text")
            waiting += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            waiting += [(inner, depth + 1) for inner in value]
