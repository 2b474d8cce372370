"""A Megatron engine's state on disk: not there yet."""

from __future__ import annotations

from typing import Any


def save(engine: Any, folder: str, staged: bool) -> None:
    raise NotImplementedError


def load(engine: Any, folder: str) -> None:
    raise NotImplementedError
