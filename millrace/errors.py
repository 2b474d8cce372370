"""Typed errors. Each message names the wrong value and the fix, and no secret of the user."""

from __future__ import annotations

import importlib
import json
import os
import re
from asyncio import CancelledError
from functools import cache, lru_cache
from typing import Any
from urllib.parse import quote

_SECRET = re.compile(rb"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_?\d+)?$", re.IGNORECASE)
_SHORTEST = 8
"""Characters of a secret. A shorter value is also an ordinary word."""


def secrets_of_user() -> dict[str, str]:
    """Return the environment variables whose names say that they are secrets."""
    names = [os.fsdecode(name) for name in os.environb if _is_secret(name)]
    values = {name: os.environ.get(name, "").strip() for name in names}
    return {name: value for name, value in values.items() if len(value) >= _SHORTEST}


@cache
def _is_secret(name: bytes) -> bool:
    return _SECRET.search(name) is not None


def redact(text: str) -> str:
    """Return a text with `***` in place of each secret of the user."""
    for value in sorted(secrets_of_user().values(), key=len, reverse=True):
        for form in forms_of(value):
            text = text.replace(form, "***")
    return text


@lru_cache(256)
def forms_of(secret: str) -> tuple[str, ...]:
    """Return a secret as it is, in an address, as Python shows it, and as JSON."""
    address = quote(secret, safe="", errors="surrogateescape")
    return tuple({secret: 0, address: 0, repr(secret)[1:-1]: 0, json.dumps(secret)[1:-1]: 0})


class MillraceError(Exception):
    """Base class of every error that millrace raises on purpose."""

    exit_code = 1

    def __init__(self, text: str = "") -> None:
        super().__init__(redact(text))


def first_cause(error: BaseException) -> BaseException:
    """Return the first error of an exception group that is not just a cancellation."""
    if isinstance(error, BaseExceptionGroup):
        leaves = [first_cause(e) for e in error.exceptions]
        return next((e for e in leaves if not isinstance(e, CancelledError)), leaves[0])
    return error


class ConfigError(MillraceError):
    """A key of the configuration is wrong. The message has the key, value, rule and fix."""

    exit_code = 2
    rule = ""


class DataError(MillraceError):
    """A row or file of data is wrong. The message has the file, row, value, rule and fix."""

    exit_code = 2


class LedgerError(MillraceError):
    """An illegal move in the life of a sample. The bug is in millrace, never in the user's code."""


class SampleError(MillraceError):
    """One sample cannot be trained. It is counted by its reason, dropped and replaced."""

    def __init__(self, reason: str, detail: str, trace: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.trace = redact(trace)
        """The traceback of the user's code, if it raised in another process."""


class RewardError(SampleError):
    """A reward function raised, returned a value that is not a number, or missed its deadline."""


class EpisodeError(SampleError):
    """An agent, its program, a tool or an environment failed. The policy is not at fault."""


class TeacherError(SampleError):
    """A teacher outside of the trainer did not give the log-probs of a trajectory."""


class LimitReached(MillraceError):
    """A limit of the episode leaves no room for another token. The episode is scored."""

    def __init__(self, limit: str, detail: str) -> None:
        super().__init__(f"{limit}: {detail}")
        self.limit = limit
        """"turns", "tokens" or "context"."""


class WorkerError(MillraceError):
    """A worker process died or raised."""


class ReplicaLost(WorkerError):
    """A replica died, fell silent or stood still. Its requests go on elsewhere."""


class NoDevices(WorkerError):
    """No free devices are left for a replica. Nothing is wrong with it."""


class DeadlineError(MillraceError):
    """A wait missed its deadline. The message names the waiting task and the event it waits for."""


class NoAnswer(DeadlineError):
    """A worker did not answer a call in time, and made no progress with it."""

    worker = ""
    """The name of the worker."""


class SyncError(MillraceError):
    """A replica's weights differ from the trainer's. The replica must not serve them."""

    replica: int | None = None
    """The replica whose weights are wrong. None if no single replica is at fault."""


class GapError(MillraceError):
    """Rollout engines and trainer disagree on the same weights. Another start does not help."""

    exit_code = 3


class BrokenTransfer(SyncError):
    """A transfer broke off, because a process of its group died or left. No weights are wrong."""


class CopyGone(SyncError):
    """A version cannot be sent again: the trainer's weights are newer, and its copy is freed."""


class NotFinite(MillraceError):
    """Several optimizer steps in a row had no finite loss and gradient. No weight has changed."""


class CheckpointError(MillraceError):
    """A checkpoint cannot be written or read."""


class DiskError(CheckpointError):
    """The disk refuses to write. A run goes on until its last checkpoint."""


class NotRestorable(CheckpointError):
    """The state of a lost trainer cannot be made again. The message has the key that helps."""


class SaveLost(DiskError):
    """The ranks that were writing a checkpoint are lost. The run goes on, as with a full disk."""


INSTALL = {
    "aiohttp": "pip install 'aiohttp>=3.14'",
    "duckdb": "pip install 'duckdb>=1.1'",
    "fastapi": "pip install 'fastapi>=0.115' 'uvicorn>=0.30'",
    "gguf": "pip install 'gguf>=0.17'",
    "gymnasium": "pip install 'gymnasium>=1'",
    "mcp": "pip install 'mcp>=2'",
    "megatron-core": "pip install 'megatron-core==0.16.1'",
    "mlflow-skinny": "pip install 'mlflow-skinny>=3' 'sqlalchemy>=2' 'alembic>=1.13'",
    "openai": "pip install 'openai>=3'",
    "peft": "pip install 'peft>=0.17'",
    "prometheus_client": "pip install 'prometheus_client>=0.20'",
    "ray": "pip install 'ray>=2.60'",
    "s3fs": "pip install 's3fs>=2024.6'",
    "sglang": "make sglang, and rollout.python=.venv-sglang/bin/python",
    "textarena": "pip install 'textarena>=0.7.4'",
    "trackio": "pip install 'trackio>=0.43'",
    "vllm": "make gpu on a machine with GPUs, or its CPU build as docs/vllm.md says",
    "wandb": "pip install 'wandb>=0.31'",
}
"""The command that installs each optional package."""


class MissingDependency(MillraceError):
    """An optional package is missing. The message has the command that installs it."""

    exit_code = 2


def needed(package: str, who: str) -> Any:
    """Import an optional package. Raise MissingDependency if `who` has to do without it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        rule = f"{who} needs the package {package}, which is missing"
        raise MissingDependency(f"{rule}. Fix: {INSTALL[package]}.") from error


def bad_value(key: str, value: object, rule: str, fix: str) -> ConfigError:
    """Return a ConfigError in the form that all of them share."""
    shown = key if key.isprintable() else repr(key)
    value = list(value) if isinstance(value, tuple) else value  # as an override writes it
    error = ConfigError(f"{shown} = {value!r}: {rule}. Fix: {fix}.")
    error.rule = rule
    return error


def bad_row(where: str, value: object, rule: str, fix: str) -> DataError:
    """Return a DataError in the form that all of them share. `where` is the file and the row."""
    try:
        shown = repr(value)
    except ValueError:  # Python refuses to print an integer of over 4300 digits
        shown = f"a value of type {type(value).__name__}"
    return DataError(
        f"{where}: {shown if len(shown) <= 120 else shown[:117] + '...'}: {rule}. Fix: {fix}."
    )
