"""Typed errors. Each message says what was found and what to change."""

from __future__ import annotations


class MillraceError(Exception):
    """Base of every error that millrace raises on purpose."""

    exit_code = 1


class ConfigError(MillraceError):
    """A key of the configuration is wrong: key, value, rule and fix are in the message."""

    exit_code = 2


class DataError(MillraceError):
    """A row or file of data is wrong: file, row, value, rule and fix are in the message."""

    exit_code = 2


class LedgerError(MillraceError):
    """An illegal move in the life of a sample: a bug in millrace, never of the user."""


class RewardError(MillraceError):
    """A reward function raised, returned something that is no number, or ran past its deadline."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class WorkerError(MillraceError):
    """A worker process died or raised."""


class DeadlineError(MillraceError):
    """A wait ran past its deadline; the message names who waited, and for what."""


class SyncError(MillraceError):
    """A replica's weights are not the trainer's: it must not serve them."""


class CheckpointError(MillraceError):
    """A checkpoint cannot be written or read."""


INSTALL = {
    "peft": "pip install 'peft>=0.17'",
    "ray": "pip install 'ray>=2.50'",
    "vllm": "make gpu on a machine with GPUs, or its CPU build as docs/vllm.md says",
}
"""What brings the packages that one engine, one runtime or one way of training needs."""


class MissingDependency(MillraceError):
    """An optional package is missing; the message has the command that installs it."""

    exit_code = 2


def bad_value(key: str, value: object, rule: str, fix: str) -> ConfigError:
    """A ConfigError in the one form that all of them have."""
    shown = key if key.isprintable() else repr(key)
    return ConfigError(f"{shown} = {value!r}: {rule}. Fix: {fix}.")


def bad_row(where: str, value: object, rule: str, fix: str) -> DataError:
    """A DataError in the one form that all of them have; `where` is file and row."""
    try:
        shown = repr(value)
    except ValueError:  # Python writes no integer of over 4300 digits
        shown = f"a value of type {type(value).__name__}"
    return DataError(
        f"{where}: {shown if len(shown) <= 120 else shown[:117] + '...'}: {rule}. Fix: {fix}."
    )
