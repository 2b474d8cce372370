"""Ask every process of a run who waits, and ask the kernel about those that do not answer."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

import msgspec

from millrace.waits import kernel
from millrace.waits.answer import Process, ProcessStatus
from millrace.waits.graph import DRIVER
from millrace.waits.wait_server import FOLDER, short

DEADLINE_S = 2.0
"""Seconds that a process has for its answer. A stopped one never answers."""
_MOST_BYTES = 256 * 2**20
# Threads must not meet a type that msgspec is still reading: the process would crash.
_answers = msgspec.json.Decoder(list[ProcessStatus])


class Told(TypedDict):
    """The status files of a run's processes."""

    name: str
    pid: int
    host: str


def processes(run: Path) -> list[Told]:
    """Return what each process of a run wrote about itself. Other files do not count."""
    found = []
    for path in sorted((run / FOLDER).glob("[!.]*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found.append(msgspec.json.decode(path.read_bytes(), type=Told))
    return found


def driver_of(run: Path) -> Told | None:
    """Return the driver of a run, if the run has one."""
    return next((p for p in processes(run) if p["name"] == DRIVER), None)


def lives(told: Told) -> bool:
    """Return whether a process of this machine has not ended."""
    return not gone(kernel.look([told["pid"]])[told["pid"]])


def ask(run: Path, own: Sequence[ProcessStatus] = ()) -> list[ProcessStatus]:
    """Return an answer for each process of a run, the driver first.

    `own` has answers that the caller knows already, with their kernel's view.
    """
    here, known = socket.gethostname(), {a.name for a in own}
    told = [p for p in processes(run) if p["name"] not in known and p["host"] == here]
    with ThreadPoolExecutor(max(1, len(told))) as pool:
        each = list(pool.map(lambda p: ask_one(run, p), told))
    answers = {a.name: a for a in own}
    for given in each:
        for answer in given:
            answers.setdefault(answer.name, answer)
    local = [a for a in answers.values() if a.host == here]
    family = kernel.descendants_of([a.pid for a in local])
    seen = kernel.look([*(a.pid for a in local), *(p for c in family.values() for p in c)])
    for answer in local:
        answer.process = seen[answer.pid]
        answer.children = [seen[pid] for pid in family[answer.pid]]
        if answer.silent and gone(answer.process):
            what = "the driver" if answer.name == DRIVER else f"worker {answer.name}"
            answer.dead = f"{what} (process {answer.pid}) has ended; its log is in RUN/logs"
    return sorted(answers.values(), key=lambda a: (a.name != DRIVER, a.name))


def ask_one(run: Path, told: Told) -> list[ProcessStatus]:
    """Ask one of `processes`. With Ray, the driver answers for all."""
    path = run / FOLDER / f"{told['name']}.sock"
    data = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client, short(path) as name:
            client.settimeout(DEADLINE_S)
            client.connect(name)
            while (more := client.recv(2**16)) and len(data) < _MOST_BYTES:
                data += more
        return _answers.decode(data)
    except (OSError, msgspec.DecodeError):
        return [ProcessStatus(told["name"], told["pid"], told["host"], silent=True)]


def gone(process: Process | None) -> bool:
    """Return whether a process has ended."""
    return process is None or process.state in ("", "Z", "X")
