"""One reader of a run's folder: rows, history, accounts, samples, alarms, state and configuration.

The folder may come from somebody else, and its run may go on, here or on another machine. So every
file may be missing, half written or damaged. Nothing but files is read: there is no signal, no lock
and no event of the file system.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
import yaml

from millrace import __version__
from millrace.codec import sendable
from millrace.config import Config
from millrace.config.algorithm_keys import without_own_algorithm
from millrace.errors import MillraceError, bad_value
from millrace.observe.files import Tail, changed, files_in, flat, open_regular
from millrace.observe.guard import PREFIX
from millrace.observe.timing import is_quiet
from millrace.persist import accounts, history, ownership

METRICS = "metrics.jsonl"
FILES = (METRICS, history.FILE, accounts.FILE)
"""A run's folder has one of these."""
SAMPLES = re.compile(r"version-(\d{6,12})-attempt-(\d{3,9})\.parquet")
"""The files of samples of the surviving history."""
ROUNDING_S = 1e-3
"""Seconds below zero that rounding may make. With more, a line is damaged."""
_MOST = 10**9
"""More versions than any run has."""
CLOCKS_S = 60.0
"""The most by which the clock of a shared file system may be behind this machine's."""
BEFORE = "; it makes the model, starts engines or warms up, of which the folder has no figures"
EXAMPLE = "a folder such as runs/quickstart-1"

Row = dict[str, float]
State = Literal["empty", "starting", "running", "complete", "stopped", "gone"]

_metrics = msgspec.json.Decoder(dict[str, Any])  # made now, for threads: see waits/ask.py


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm of the guard: the first and the last version of each time that it was active."""

    name: str
    periods: list[tuple[int, int]]
    active: bool
    """Whether the newest row has it."""


class RunReader:
    """Reads one folder again and again. Each `read` takes what is new."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = path, clock
        self.rows: dict[int, Row] = {}
        """The metrics of each version."""
        self.validations: dict[int, Row] = {}
        self.names: dict[str, None] = {}
        """The metrics that a line has, also those without a number."""
        self.history: list[history.Line] = []
        self.accounts: list[accounts.Line] = []
        """Both have the lines of all attempts, oldest first."""
        self.tree: dict[str, Any] = {}
        """The configuration. It is empty if its file is not readable."""
        self.config: Config | None = None
        """The same, checked. None if another version of millrace wrote it."""
        self.state: State = "empty"
        self.process = ""
        """The facts about the run's process, as a sentence."""
        self.notes: list[str] = []
        """What readers lack: damage in the folder, and what a table leaves out. All print them."""
        self._lives: bool | None = None
        self._tails = (
            Tail(path / METRICS, _metrics, _fault),
            Tail(path / history.FILE, history.DECODER),
            Tail(path / accounts.FILE, accounts.DECODER),
        )
        self._configured, self._config_notes = -1.0, list[str]()

    def read(self) -> RunReader:
        """Read the lines that are new, and return this reader."""
        metrics, moments, amounts = self._tails
        anew, rows = metrics.read()
        if anew:
            self.rows, self.validations, self.names = {}, {}, {}
        for row in rows:
            self._add(row)
        anew, lines = moments.read()
        self.history = [*([] if anew else self.history), *lines]
        anew, spent = amounts.read()
        self.accounts = [*([] if anew else self.accounts), *spent]
        self.state, self.process = self._state()
        self.notes = [*self._read_config(), *self._damage()]
        self.__dict__.pop("audit", None)
        return self

    def unreadable(self, name: str) -> OSError | None:
        """Return the error of a file that is there and cannot be read."""
        return next((tail.error for tail in self._tails if tail.path.name == name), None)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def mode(self) -> str:
        """The mode that the Schedule of the configuration shows. Empty if it is not known."""
        return self.config.mode_name if self.config else ""

    def key(self, name: str, default: Any = None) -> Any:
        """Return the value of a key such as `rollout.n`."""
        value: Any = self.tree
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    def keys(self) -> dict[str, str]:
        """Return all keys by their dotted names, with their values as text."""
        return {
            sendable(key): sendable(json.dumps(value, default=str, ensure_ascii=False))
            for key, value in flat(self.tree)
        }

    @property
    def agents(self) -> bool:
        """Whether agents played the episodes."""
        return any(name.startswith("agents/") for row in self.rows.values() for name in row)

    @property
    def versions(self) -> int:
        """The newest version."""
        known = (line.version for line in self.history)
        return max([*self.rows, *self.validations, *known], default=0)

    @property
    def attempt(self) -> list[accounts.Line]:
        """The accounts of the newest attempt."""
        lines = self.accounts
        return [line for line in lines if line.attempt == lines[-1].attempt]

    @cached_property
    def audit(self) -> history.Audit | None:
        """The account of every sample. None if the history is missing or damaged."""
        whole = self.history and not self._tails[1].damage
        return history.audit_of(self.history) if whole else None

    @property
    def samples(self) -> list[Path]:
        """The files of samples of the surviving history, by version."""
        return files_in(self.path / "samples", SAMPLES)

    @property
    def age_s(self) -> float | None:
        """Seconds since a file of the run changed. None if there is none."""
        newest = max(map(changed, self.files()), default=0.0)
        return max(0.0, self._clock() - newest) if newest else None

    @property
    def running(self) -> bool:
        """Whether the run goes on. Without a process that this machine can see, its files say it."""
        row = self.rows[max(self.rows)] if self.rows else {}
        return self.state == "running" and bool(self._lives or not is_quiet(self.age_s, row))

    def files(self) -> Iterator[Path]:
        """Yield the files that a run writes as it goes."""
        yield from (self.path / name for name in (*FILES, ".lock"))
        for inner in ("trace", "samples", "logs"):
            try:
                with os.scandir(self.path / inner) as entries:
                    yield from (Path(entry.path) for entry in entries)
            except OSError:
                continue

    def alarms(self) -> list[Alarm]:
        """Return every alarm that was ever active."""
        periods: dict[str, list[tuple[int, int]]] = {}
        before = None
        for version, row in sorted(self.rows.items()):
            for name, value in row.items():
                if not name.startswith(PREFIX):
                    continue
                found = periods.setdefault(name.removeprefix(PREFIX), [])
                if value and found and found[-1][1] == before:
                    found[-1] = found[-1][0], version
                elif value:
                    found.append((version, version))
            before = version
        return [
            Alarm(name, found, found[-1][1] == before) for name, found in periods.items() if found
        ]

    def _add(self, line: dict[str, Any]) -> None:
        """Add a line of metrics.jsonl."""
        version = line.pop("version")
        self.names |= dict.fromkeys(map(sendable, line))
        row = {sendable(name): float(value) for name, value in line.items() if _is_number(value)}
        if row:
            validates = all(name.startswith("val/") for name in row)
            (self.validations if validates else self.rows)[int(version)] = row

    def _read_config(self) -> list[str]:
        """Read the configuration if it is new. Return what is wrong with its file."""
        written = changed(self.path / "config.yaml")
        if written == self._configured:
            return self._config_notes
        try:
            self.tree = read_config(self.path)
            self._configured, self._config_notes = written, []
        except (OSError, ValueError) as error:
            return [f"config.yaml: {getattr(error, 'strerror', None) or error}"]
        try:
            self.config = Config.model_validate(without_own_algorithm(self.tree))
        except (ValueError, TypeError, OverflowError, MillraceError) as error:
            self.config = None
            rule = f"not a configuration of millrace {__version__}"
            self._config_notes = [f"config.yaml: {rule}: {' '.join(str(error).split())[:200]}"]
        return self._config_notes

    def _damage(self) -> Iterator[str]:
        metrics = self._tails[0]
        for tail in self._tails:
            name = tail.path.name
            if tail.error:
                yield f"{name}: {tail.error.strerror or tail.error}"
            elif tail.bad and name == history.FILE:
                yield f"{name}: {tail.path}, {tail.damage}"
            elif tail.bad:
                yield f"{name}: {tail.bad} lines are not readable"
            elif tail.half and self.state not in ("starting", "running"):
                yield f"{name}: its last line has no end, and is left out"
        if self.accounts and not self.history:
            yield f"{history.FILE}: is missing or empty"
        if any(line.version for line in self.history) and not (self.rows or metrics.bad):
            yield f"{METRICS}: is missing or empty"

    def _state(self) -> tuple[State, str]:
        """Return the state of the run, and what is known of its process."""
        last = self.history[-1] if self.history else None
        self._lives, process, locked = self._process()
        later = self._lives and locked > changed(self.path / history.FILE)
        if last is not None and last.event == "end" and not later:
            return ("complete" if last.complete else "stopped"), "the run has ended"
        if last is None and self.validations and not locked:  # `millrace eval` takes no lock
            return "complete", "the evaluation has ended"
        if self._lives is False:
            end = "the run has no end: killed, failed, or never trained"
            return "gone", f"{process} is gone, and {end}"
        if last is None or last.event == "end":
            begun = self._lives or locked
            return ("starting" if begun else "empty"), process + BEFORE * bool(self._lives)
        return "running", process

    def _process(self) -> tuple[bool | None, str, float]:
        """Return whether the run's process lives, a sentence on it, and the time of its lock.

        None means that this machine cannot know it.
        """
        path = self.path / ".lock"
        locked = changed(path)
        if self.path.resolve() in ownership.locks:  # a look into the file would release the lock
            return True, f"process {os.getpid()} of this machine is running", locked
        try:
            with open_regular(path) as file:
                found = re.match(rb"process (\d{1,9}) on ([\w.-]{1,255})\n", file.read(400))
        except OSError:
            found = None
        if found is None:
            return None, "no process has this folder yet", locked
        number, host = int(found[1]), found[2].decode(errors="replace")
        if host != socket.gethostname():
            return None, f"process {number} is on {host}, so this machine cannot see it", locked
        lives = _lives(number, locked)
        what = f"process {number} of this machine"
        return lives, f"{what} is running" if lives else what, locked


def load(path: Path) -> RunReader:
    """Read the folder of a run that has figures. Raises ConfigError if it is none."""
    check(path, *FILES)
    run = RunReader(path).read()
    known = run.rows or run.validations or run.history or run.accounts
    if not known and not ownership.is_ours(path):
        rule = f"is not a run folder, because no line of {', '.join(FILES)} is a run's"
        raise bad_value("RUN", str(path), rule, EXAMPLE)
    return run


def check(path: Path, *files: str) -> None:
    """Raise ConfigError unless `path` is the folder of a run that has one of `files`."""
    if not path.is_dir():
        rule = "is a file" if path.exists() else f"no such folder (from {Path.cwd()})"
    elif any((path / name).is_file() for name in files):
        return
    elif ownership.is_ours(path) and not any((path / name).is_file() for name in FILES):
        rule, fix = "has no figures: the run has not trained yet", f"millrace watch {path}"
        raise bad_value("RUN", str(path), rule, fix)
    else:
        none = "no" if len(files) == 1 else "none of"
        rule = f"is not a run folder, because it has {none} {', '.join(files)}"
    raise bad_value("RUN", str(path), rule, EXAMPLE)


def _fault(line: dict[str, Any]) -> str:
    """Return what is wrong with a line of metrics, or ""."""
    version = line.get("version")
    if not _is_number(version) or not 0 <= version < _MOST or version % 1:  # type: ignore[operator]
        return f"version {version!r:.40}"
    for name, value in line.items():
        if isinstance(value, str | list | dict):
            return f"{name:.80} is {value!r:.40}"
        if name.startswith("timing_s/") and _is_number(value) and value < -ROUNDING_S:
            return f"{name:.80} is {value:g} s"
    return ""


def _is_number(value: object) -> bool:
    """Whether a value is a finite number that a float can have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and abs(value) < 1e300
    except OverflowError:
        return False


def _lives(number: int, since: float) -> bool:
    """Whether the process lives that wrote its number at `since`. A younger one took its number."""
    try:
        process = psutil.Process(number)
        return (
            process.create_time() <= since + CLOCKS_S and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


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
