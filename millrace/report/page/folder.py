"""What a report reads in the folder of a run. Every file may be missing or half written."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.codec import sendable
from millrace.errors import CheckpointError, ConfigError, bad_value
from millrace.observe.files import lines
from millrace.pipeline import history, ownership
from millrace.report.accounts.lines import Line, read_counted
from millrace.report.config_file import read_config

Row = dict[str, float]

_MARKS = ("metrics.jsonl", "history.jsonl", "accounts.jsonl")
"""A run's folder has one of these."""


@dataclass
class RunFolder:
    """The small files of a run. Spans and samples are read by those who draw them."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    """The metrics of each version."""
    validations: dict[int, Row] = field(default_factory=dict)
    lines: list[history.Line] = field(default_factory=list)
    audit: history.Audit | None = None
    accounts: list[Line] = field(default_factory=list)
    """The lines of accounts.jsonl, of all attempts."""
    running: bool = False
    """Whether the run seems to go on."""
    notes: list[str] = field(default_factory=list)
    """What could not be read."""

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def key(self, name: str, default: Any = None) -> Any:
        """Return the value of a key such as `rollout.n`."""
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    @property
    def agents(self) -> bool:
        """Whether agents played the episodes."""
        return any(name.startswith("agents/") for row in self.rows.values() for name in row)

    @property
    def versions(self) -> int:
        """Return the newest version."""
        return max([*self.rows, *self.validations, *(line.version for line in self.lines)], default=0)  # fmt: skip


def check(path: Path) -> None:
    """Raise ConfigError if `path` is not the folder of a run."""
    if not path.is_dir():
        rule = f"no such folder (from {Path.cwd()})" if not path.exists() else "is not a folder"
    elif not any((path / name).is_file() for name in _MARKS) and ownership.is_ours(path):
        raise not_yet(path)
    elif not any((path / name).is_file() for name in _MARKS):
        rule = "is not a run folder, because it has none of " + ", ".join(_MARKS)
    else:
        return
    raise bad_value("RUN", str(path), rule, "a folder such as runs/quickstart-1")


def not_yet(path: Path) -> ConfigError:
    """Return the error for a run that starts its engines, or that failed before it trained."""
    fix = f"millrace watch {path}"
    return bad_value("RUN", str(path), "has no figures: the run has not trained yet", fix)


def load(path: Path) -> RunFolder:
    """Read the small files of a run. Raises ConfigError if `path` is not the folder of a run."""
    check(path)
    run = RunFolder(path)
    run.config = _config(run)
    for row in _lines(run, "metrics.jsonl"):
        version, figures = _row(row)
        if version is not None and figures:
            only_val = all(name.startswith("val/") for name in figures)
            (run.validations if only_val else run.rows)[version] = figures
    try:
        run.lines = history.read(path)
        run.audit = history.audit(path)
    except (CheckpointError, OSError, UnicodeDecodeError) as error:
        run.notes.append(f"history.jsonl: {error}")
    try:
        run.accounts, bad = read_counted(path)
        if bad:
            run.notes.append(f"accounts.jsonl: {bad} lines are not readable")
    except OSError as error:
        run.notes.append(f"accounts.jsonl: {error.strerror or error}")
    known = run.rows or run.validations or run.lines or run.accounts
    if not known and not ownership.is_ours(path):
        rule = f"is not a run folder, because no line of {', '.join(_MARKS)} is a run's"
        raise bad_value("RUN", str(path), rule, "a folder such as runs/quickstart-1")
    run.running = _is_fresh(run)
    return run


def flat(config: dict[str, Any], above: str = "") -> dict[str, str]:
    """Return the keys of a configuration by their dotted names, with their values as text."""
    found: dict[str, str] = {}
    for key, value in config.items():
        name = f"{above}{key}"
        if isinstance(value, dict) and value:
            found |= flat(value, f"{name}.")
        else:
            found[sendable(name)] = sendable(json.dumps(value, default=str, ensure_ascii=False))
    return found


def _config(run: RunFolder) -> dict[str, Any]:
    try:
        return read_config(run.path)
    except OSError as error:
        run.notes.append(f"config.yaml: {error.strerror or error}")
    except ValueError as error:
        run.notes.append(f"config.yaml: {error}")
    return {}


def _lines(run: RunFolder, name: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file. Lines that are not objects are counted in a note."""
    path, bad = run.path / name, 0
    if not path.is_file():
        return
    try:
        for text in lines(path):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict):
                yield line
            else:
                bad += bool(text.strip())
    except OSError as error:
        run.notes.append(f"{name}: {error.strerror or error}")
    if bad:
        run.notes.append(f"{name}: {bad} lines are not readable")


def _row(line: dict[str, Any]) -> tuple[int | None, Row]:
    version = line.pop("version", None)
    if not _is_number(version) or version < 0:
        return None, {}
    return int(version), {sendable(name): float(v) for name, v in line.items() if _is_number(v)}


def _is_number(value: object) -> bool:
    """Whether a value is a finite number that a float can have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and abs(value) < 1e300
    except OverflowError:
        return False


def _is_fresh(run: RunFolder) -> bool:
    """Whether the last attempt has no end, and wrote something within its last few versions.

    The lock of the folder says nothing here: a process that reads its own lock would release it.
    """
    if not run.lines or run.lines[-1].event == "end":
        return False
    steps = [row["timing_s/step"] for row in run.rows.values() if "timing_s/step" in row]
    try:
        written = max((run.path / name).stat().st_mtime for name in _MARKS if (run.path / name).exists())  # fmt: skip
    except (OSError, ValueError):
        return False
    return time.time() - written < max(60.0, 5 * max(steps, default=0.0))
