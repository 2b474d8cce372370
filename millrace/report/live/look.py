"""What the folder of a run shows at this moment. Nothing but its files is read.

A look needs no signal, no lock and no event of the file system. So it also works on another
machine that shares the folder.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import psutil

from millrace.config import Config
from millrace.errors import MillraceError
from millrace.observe.files import open_regular
from millrace.observe.guard import CAUSES, PREFIX
from millrace.report.accounts.lines import FILE, Line
from millrace.report.accounts.lines import Device as Account
from millrace.report.config_file import read_config
from millrace.report.live.tail import Tail
from millrace.schedule.modes import name_of

RECENT = 10
"""Versions that the recent figures cover."""
PACE = 50
"""Versions whose pace predicts the end."""
CLOCKS_S = 60.0
"""The most by which the clock of a shared file system may be behind this machine's."""
BEFORE = "; it makes the model, starts engines or warms up, of which the folder has no figures"
_LARGEST = 1e15
"""Larger figures are not figures of a run."""

State = Literal["empty", "starting", "running", "complete", "stopped", "gone"]
Row = dict[str, float]


@dataclass(frozen=True, slots=True)
class Device:
    """One row of the accounts: how a device, or a group of them, spends its time."""

    name: str
    count: int
    recent: dict[str, float]
    """Share of each part in the last versions. The shares add up to 1."""
    whole: dict[str, float]
    """The same for the whole attempt."""


@dataclass(frozen=True, slots=True)
class Alarm:
    name: str
    since: int
    text: str
    """The cause and the fix."""


@dataclass(frozen=True, slots=True)
class Look:
    """The figures of one moment."""

    folder: str
    name: str
    mode: str
    state: State
    process: str
    """What is known of the run's process, as a sentence."""
    age_s: float | None
    """Seconds since a file of the run changed."""
    attempt: int = 0
    version: int = 0
    versions: int | None = None
    samples: int = 0
    total: int | None = None
    eta_s: float | None = None
    rewards: list[float] = field(default_factory=list)
    row: Row = field(default_factory=dict)
    """The newest row of metrics.jsonl."""
    before: Row = field(default_factory=dict)
    """The first validation."""
    validation: Row = field(default_factory=dict)
    """The newest validation."""
    validated: int = 0
    """The version of the newest validation."""
    alarms: list[Alarm] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    generated: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    """Generated tokens by bucket."""

    @property
    def ended(self) -> bool:
        """Whether nothing more comes, as far as this machine can tell."""
        return self.state in ("complete", "stopped", "gone")


class Moment(msgspec.Struct, frozen=True):
    """A line of history.jsonl, with the fields that a look needs."""

    event: str
    attempt: int
    version: int
    complete: bool = False
    retired: int = 0


L = TypeVar("L", Moment, Line)


NO_ACCOUNT = Account(0, {})


class Looker:
    """Looks at one folder again and again. Each look reads what is new."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._clock = clock
        self._metrics = Tail(folder / "metrics.jsonl", dict[str, float | None])
        self._history = Tail(folder / "history.jsonl", Moment)
        self._accounts = Tail(folder / FILE, Line)
        self._rows: dict[int, Row] = {}
        self._validations: dict[int, Row] = {}
        self._moments: list[Moment] = []
        self._lines: list[Line] = []
        self._config: tuple[float, Config | None] = (0.0, None)

    def look(self) -> Look:
        """Return what the files show now."""
        self._read()
        config = self._read_config()
        last = self._moments[-1] if self._moments else None
        attempt = last.attempt if last else 0
        state, process = self._state(last)
        rows = [self._rows[v] for v in sorted(self._rows)]
        validated = sorted(self._validations)
        total, versions, eta = self._plan(config, rows, last)
        return Look(
            folder=str(self.folder),
            name=config.name if config else self.folder.resolve().name,
            mode=name_of(config.schedule, config.mode) if config else "",
            state=state,
            process=process,
            age_s=self._age(),
            attempt=attempt,
            version=last.version if last else 0,
            versions=versions,
            samples=last.retired if last else 0,
            total=total,
            eta_s=eta if state == "running" else None,
            rewards=[row["reward/mean"] for row in rows if "reward/mean" in row],
            row=rows[-1] if rows else {},
            before=self._validations[validated[0]] if len(validated) > 1 else {},
            validation=self._validations[validated[-1]] if validated else {},
            validated=validated[-1] if validated else 0,
            alarms=list(_alarms(self._rows)),
            devices=list(_devices(self._lines)),
            generated=self._lines[-1].generated if self._lines else 0,
            tokens=dict(self._lines[-1].tokens) if self._lines else {},
        )

    def _read(self) -> None:
        """Read the lines that are new."""
        anew, rows = self._metrics.read()
        if anew:
            self._rows, self._validations = {}, {}
        for each in rows:
            row = {k: v for k, v in each.items() if v is not None and abs(v) < _LARGEST}
            version = int(row.pop("version", -1))
            if version < 0 or not row:
                continue
            of_validation = all(name.startswith("val/") for name in row)
            (self._validations if of_validation else self._rows)[version] = row
        anew, moments = self._history.read()
        self._moments = _surviving([*([] if anew else self._moments), *moments])
        anew, lines = self._accounts.read()
        self._lines = _surviving([*([] if anew else self._lines), *lines])

    def _read_config(self) -> Config | None:
        """Return the run's configuration. None if it cannot be read here."""
        path = self.folder / "config.yaml"
        try:
            written = path.stat().st_mtime
            if written != self._config[0]:
                self._config = written, Config.model_validate(read_config(self.folder))
        except (OSError, ValueError, OverflowError, MillraceError):
            return self._config[1]  # half written, or of another version of millrace
        return self._config[1]

    def _state(self, last: Moment | None) -> tuple[State, str]:
        """Return the state of the run, and what is known of its process."""
        lives, process, locked = self._process()
        recorded = changed(self.folder / "history.jsonl")
        if last is not None and last.event == "end" and not (lives and locked > recorded):
            return ("complete" if last.complete else "stopped"), "the run has ended"
        if lives is False:
            end = "the run has no end: killed, failed, or never trained"
            return "gone", f"{process} is gone, and {end}"
        if last is None or last.event == "end":
            return ("starting" if lives or locked else "empty"), process + BEFORE * bool(lives)
        return "running", process

    def _process(self) -> tuple[bool | None, str, float]:
        """Return whether the run's process lives, a sentence on it, and the time of its lock.

        None means that this machine cannot know it.
        """
        path = self.folder / ".lock"
        locked = changed(path)
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

    def _age(self) -> float | None:
        """Return the seconds since a file of the run changed."""
        newest = max(
            (changed(path) for path in files_of(self.folder)),
            default=0.0,
        )
        return max(0.0, self._clock() - newest) if newest else None

    def _plan(
        self, config: Config | None, rows: list[Row], last: Moment | None
    ) -> tuple[int | None, int | None, float | None]:
        """Return the samples and versions of the whole run, and the seconds that are left."""
        if config is None:
            return None, None, None
        done, version = (last.retired, last.version) if last else (0, 0)
        total = self._lines[-1].limit if self._lines else None
        total = _limit(config) if total is None else total
        if total is None or not 0 <= total < _LARGEST:
            return None, None, None
        left = max(0, total - done)
        recent = rows[-PACE:]
        samples = sum(row.get("train/samples", 0.0) for row in recent)
        seconds = sum(row.get("timing_s/step", 0.0) for row in recent)
        eta = left * seconds / samples if samples > 0 and seconds > 0 else None
        return total, version + config.schedule.versions(left), eta


def _limit(config: Config) -> int | None:
    """Return the samples of the whole run, if the configuration says it without the data."""
    if config.trainer.total_epochs:
        return None
    try:
        return config.derived(None).samples
    except MillraceError:
        return None


def _surviving(lines: list[L]) -> list[L]:
    """Return the lines without those that a later attempt supersedes."""
    found: list[L] = []
    for line in lines:
        if line.event == "start":
            found = [earlier for earlier in found if earlier.version <= line.version]
        found.append(line)
    return found


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


def changed(path: Path) -> float:
    """Return the time at which a file changed last, 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def files_of(folder: Path) -> Iterator[Path]:
    """Yield the files that a run writes as it goes."""
    for name in ("metrics.jsonl", "history.jsonl", FILE, ".lock"):
        yield folder / name
    for inner in ("trace", "samples", "logs"):
        try:
            with os.scandir(folder / inner) as entries:
                yield from (Path(entry.path) for entry in entries)
        except OSError:
            continue


def _alarms(rows: Mapping[int, Row]) -> Iterator[Alarm]:
    """Yield the alarms that are active in the newest row."""
    order = sorted(rows)
    for key, value in rows[order[-1]].items() if order else ():
        if key.startswith(PREFIX) and value:
            since = order[-1]
            for version in reversed(order):
                if not rows[version].get(key):
                    break
                since = version
            name = key.removeprefix(PREFIX)
            yield Alarm(name, since, CAUSES.get(name, ""))


def _devices(lines: list[Line]) -> Iterator[Device]:
    """Yield how each device spends its time. The accounts of time begin anew with each attempt."""
    if not lines:
        return
    last = lines[-1]
    attempt = [line for line in lines if line.attempt == last.attempt]
    earlier = next(
        (line for line in reversed(attempt) if line.version <= last.version - RECENT), attempt[0]
    )
    for name, device in sorted(last.devices.items(), key=_order):
        before = earlier.devices.get(name, NO_ACCOUNT) if earlier is not last else NO_ACCOUNT
        recent = {k: s - before.seconds.get(k, 0.0) for k, s in device.seconds.items()}
        yield Device(name, device.count, _shares(recent), _shares(device.seconds))


def _order(item: tuple[str, Account]) -> tuple[bool, int, str]:
    """Sort the trainer first, and replica 2 before replica 10."""
    return item[0] != "trainer", len(item[0]), item[0]


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each part, largest first."""
    whole = sum(s for s in seconds.values() if s > 0)
    found = {k: s / whole for k, s in seconds.items() if s > 0} if 0 < whole < _LARGEST else {}
    return dict(sorted(found.items(), key=lambda part: -part[1]))
