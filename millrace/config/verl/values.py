"""Translations of verl's values. Each raises ValueError for a value that has no equal here.

The text of a ValueError has two parts, the rule and the fix, with "; " between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

DROP = object()
"""The translation of a value that leaves millrace's default in place."""


class Updates(int):
    """A number of updates in verl's sense: all optimizer steps on one batch are one update."""


def never(value: Any) -> Any:
    """Translate -1 or null, which mean never, no limit or all, to 0."""
    return 0 if value is None or value == -1 else value


def not_none(value: Any) -> Any:
    """Leave millrace's default in place of null."""
    return DROP if value is None else value


def flag(on: Any, off: Any) -> Callable[[Any], Any]:
    """Return a translation of true to `on` and of all else to `off`."""
    return lambda value: on if value is True else off


def one_of(**names: Any) -> Callable[[Any], Any]:
    """Return a translation of names. null leaves millrace's default in place."""

    def translate(value: Any) -> Any:
        if value is None:
            return DROP
        if str(value) not in names:
            raise ValueError(f"must be one of {', '.join(names)}; {next(iter(names))}")
        return names[str(value)]

    return translate


def renamed(names: Mapping[str | None, str]) -> Callable[[Any], Any]:
    """Return a translation of some names, which leaves every other value as it is."""
    return lambda value: names.get(value, value) if isinstance(value, str | None) else value


def by_engine(value: Any) -> Any:
    """Translate the name of a rollout engine."""
    if value in ("vllm", "hf", None):
        return {"vllm": "vllm", "hf": "torch"}.get(value, DROP)
    raise ValueError(
        f"millrace has no {value} engine; actor_rollout_ref.rollout.name=vllm, or hf for the torch "
        "engine"
    )


OTHER_LOGGERS = frozenset(
    {"console", "wandb", "mlflow", "swanlab", "vemlp_wandb", "clearml", "file"}
)


def loggers(value: Any) -> Any:
    """Leave out the other sinks of verl. The console and metrics.jsonl are always written."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return value  # the check of types reports it
    return [name for name in names if name not in OTHER_LOGGERS]


def resume_mode(value: Any) -> Any:
    """Translate disable to never. resume_path takes the folder from trainer.resume_from_path."""
    return DROP if value == "resume_path" else "never" if value == "disable" else value


def trainer_mode(value: Any) -> Any:
    """Translate the mode of verl's V1 trainer."""
    modes = {
        "sync": "colocate_sync",
        "colocate_async": "colocate_partial",
        "separate_async": "async_partial",
    }
    return one_of(**modes)(value)


def lr_shape(value: Any) -> Any:
    """Check the shape of a learning rate schedule."""
    return one_of(constant="constant", linear="linear", cosine="cosine")(value)


def updates(value: Any) -> Any:
    """Mark a number of verl's updates, which becomes a number of optimizer steps. -1 means 0."""
    count = never(value)
    return Updates(count) if isinstance(count, int) else count


def buckets(value: Any) -> Any:
    """Leave millrace's default in place of null and 0, which switch the buckets off."""
    return value or DROP
