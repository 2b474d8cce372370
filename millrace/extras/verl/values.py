"""Translations of verl's values. Each raises ValueError for a value that has no equal here.

The text of a ValueError has two parts, the rule and the fix, with "; " between them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from millrace.config.layers import Updates

DROP = object()
"""The translation of a value that means millrace's default, whatever earlier layers set."""
SILENT = object()
"""The translation of a value that decides nothing."""


def never(value: Any) -> Any:
    """Translate a number below 0, false or null, which mean never, no limit or all, to 0."""
    none = value is None or value is False or (isinstance(value, int) and value < 0)
    return 0 if none else value


def not_none(value: Any) -> Any:
    """Translate null to millrace's default."""
    return DROP if value is None else value


def if_set(value: Any) -> Any:
    """Accept null and 0, which decide nothing."""
    return value or SILENT


def one_by_one(value: Any) -> Any:
    """Translate every number of samples to 1. null decides nothing."""
    return SILENT if value is None else 1 if isinstance(value, int) and value > 0 else value


def all_if_none(value: Any) -> Any:
    """Translate null and 0, which keep all checkpoints, to a number that no run reaches."""
    return 1_000_000 if never(value) == 0 else value


def only(accepted: bool, rule: str) -> Callable[[Any], Any]:
    """Return a translation that accepts the one value that acts here."""

    def translate(value: Any) -> Any:
        if value in (accepted, None):
            return SILENT
        raise ValueError(f"{rule}; leave the key out")

    return translate


def everything(value: Any) -> Any:
    """Accept the contents of a checkpoint that a resume needs."""
    needed = ("model", "optimizer", "extra")
    if value is None or (isinstance(value, list) and all(name in value for name in needed)):
        return SILENT
    raise ValueError(
        "a resume always loads the model, the optimizer and the random state; leave the key out; "
        "for a new run from a trained model, set model.path to its export"
    )


def flag(on: Any, off: Any) -> Callable[[Any], Any]:
    """Return a translation of true to `on` and of all else to `off`."""
    return lambda value: on if value is True else off


def one_of(names: Mapping[str | None, Any], rule: str = "", fix: str = "") -> Callable[[Any], Any]:
    """Return a translation of names. `rule`, where {} is the value, and `fix` refuse all others."""
    known = [name for name in names if name]

    def translate(value: Any) -> Any:
        name = None if value is None else str(value)
        if name in names:
            return names[name]
        why = rule.format(value) or f"must be one of {', '.join(known)}"
        raise ValueError(f"{why}; {fix or known[0]}")

    return translate


def renamed(names: Mapping[str | None, str]) -> Callable[[Any], Any]:
    """Return a translation of some names, which leaves every other value as it is."""
    return lambda value: names.get(value, value) if isinstance(value, str | None) else value


NO_LOGGERS = frozenset({"swanlab", "vemlp_wandb", "clearml"})
OTHER_LOGGERS = NO_LOGGERS | {"file"}


def loggers(value: Any) -> Any:
    """Leave out the sinks of verl that millrace lacks. metrics.jsonl, its file, is always there."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return value  # the check of types reports it
    return [name for name in names if name not in OTHER_LOGGERS]


def name_of_run(value: Any) -> Any:
    """Translate the name of an experiment, which becomes a part of a folder's name."""
    return re.sub(r"[^\w.-]+", "-", str(value)).lstrip(".-") or "run" if value else DROP


def resume_mode(value: Any) -> Any:
    """Translate disable to never. resume_path takes the folder from trainer.resume_from_path."""
    return SILENT if value == "resume_path" else "never" if value == "disable" else value


def updates(value: Any) -> Any:
    """Mark a number of verl's updates, which becomes a number of optimizer steps. -1 means 0."""
    count = never(value)
    return Updates(count) if isinstance(count, int) else count
