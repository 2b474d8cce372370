"""The status of a process: waits, actors, counters and stacks."""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.waits.registry import Registry

_MOST_FRAMES = 60
_COLLECTIVES = (
    *("distributed_c10d.py", "_functional_collectives.py"),
    *("_fsdp_collectives.py", "_fsdp_param_group.py"),
)
"""Files of torch whose frames mean that a thread is in a collective."""
_DEVICE = ("_clip_and_step", "reduce")
"""Functions of a learner in which the host waits for collectives of the device."""


class Waited(msgspec.Struct, frozen=True):
    """Waits that are alike, of one actor."""

    who: str
    whom: str
    what: str
    seconds: float
    """Of the oldest one."""
    count: int = 1
    meeting: str = ""
    number: int = 0
    work: bool = False


class Acted(msgspec.Struct, frozen=True):
    """Actors of one name."""

    who: str
    parent: str
    seconds: float
    count: int = 1


class Process(msgspec.Struct, frozen=True):
    """A process as the kernel sees it."""

    pid: int
    state: str = ""
    """R runs, S sleeps, D waits for the kernel, T is stopped, Z is dead. Empty: unknown."""
    wchan: str = ""
    """The function of the kernel in which it waits."""
    cpu_share: float = 0.0
    """Its CPU seconds for each second, measured just now."""
    command: str = ""

    @property
    def computes(self) -> bool:
        """Whether it computes, or would if the machine had a free core."""
        return self.state == "R" or self.cpu_share > 0.5


class ProcessStatus(msgspec.Struct):
    """The answer of one process, or what is known about one that does not answer."""

    name: str
    pid: int
    host: str = ""
    waits: list[Waited] = []
    actors: list[Acted] = []
    progress: dict[str, tuple[float, float]] = {}
    """Counters: the value, and the seconds since it moved."""
    late_s: float = 0.0
    """For how long the event loop has not run."""
    stacks: dict[str, list[str]] = {}
    """The Python stack of each thread, the innermost frame last."""
    collectives: list[str] = []
    """The last collectives of torch's flight recorder."""
    facts: dict[str, str] = {}
    process: Process | None = None
    children: list[Process] = []
    silent: bool = False
    """Whether the process did not answer."""
    dead: str = ""
    """Why the process is dead, or nothing while it lives."""

    @property
    def still_s(self) -> float | None:
        """Return the seconds since anything moved. None if the process counts nothing."""
        return min((still for _, still in self.progress.values()), default=None)


class Pulse:
    """The counters of a registry, and when each of them moved last."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._moved: dict[str, tuple[float, float]] = {}

    def look(self) -> dict[str, tuple[float, float]]:
        """Read the counters. Return each value with the seconds since it moved."""
        now, before = self.registry.clock(), self._moved
        self._moved = {
            name: before[name] if before.get(name, (None,))[0] == value else (value, now)
            for name, value in self.registry.progress().items()
        }
        return {name: (value, now - at) for name, (value, at) in self._moved.items()}


def answer_of(pulse: Pulse, *, stacks: bool = True) -> ProcessStatus:
    """Return the answer of a registry, now. Any thread may call it."""
    registry = pulse.registry
    now, moved = registry.clock(), pulse.look()
    waits: dict[tuple[Any, ...], tuple[float, int]] = {}
    for wait in list(registry.open):
        key = (wait.actor.name, wait.whom, wait.what, wait.meeting, wait.number, wait.work)
        since, count = waits.get(key, (now, 0))
        waits[key] = min(since, wait.since), count + 1
    actors: dict[tuple[str, str], tuple[float, int]] = {}
    for actor in list(registry.actors):
        pair = actor.name, actor.parent.name if actor.parent is not None else ""
        since, count = actors.get(pair, (now, 0))
        actors[pair] = min(since, actor.since), count + 1
    return ProcessStatus(
        registry.name,
        os.getpid(),
        socket.gethostname(),
        [
            Waited(who, whom, what, now - since, count, meeting, number, work)
            for (who, whom, what, meeting, number, work), (since, count) in waits.items()
        ],
        [Acted(who, up, now - since, count) for (who, up), (since, count) in actors.items()],
        moved,
        stacks=stacks_now() if stacks else {},
        collectives=flight_recorder() if stacks else [],
        facts={name: read() for name, read in list(registry.facts.items())},
    )


def stacks_now() -> dict[str, list[str]]:
    """Return the Python stack of every thread but this one, the innermost frame last."""
    names = {t.ident: t.name for t in threading.enumerate()}
    own, found = threading.get_ident(), {}
    for ident, frame in sys._current_frames().items():
        if ident != own:
            name = names.get(ident, f"thread {ident}")
            frames = traceback.StackSummary.extract(
                traceback.walk_stack(frame), limit=_MOST_FRAMES, lookup_lines=False
            )
            lines = [f"{f.filename}:{f.lineno} {f.name}" for f in reversed(frames)]
            found[name if name not in found else f"{name} {ident}"] = lines
    return found


def collective_in(stacks: Mapping[str, list[str]]) -> str:
    """Return the collective of torch in which a thread is, or nothing."""
    for lines in stacks.values():
        for line in reversed(lines[-12:]):
            if any(f"/{name}:" in line for name in _COLLECTIVES):
                return line.rpartition(" ")[2]
        path, _, name = lines[-1].rpartition(" ")
        if "/millrace/train/" in path and name in _DEVICE:
            return "sum over all ranks"
    return ""


def flight_recorder() -> list[str]:
    """Return the newest collectives that torch's flight recorder has. Empty without NCCL."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    initialized = getattr(cuda, "is_initialized", None)  # another thread may be importing torch
    if initialized is None or not initialized():
        return []
    from importlib import import_module

    c10d: Any = import_module("torch._C._distributed_c10d")
    try:
        raw = c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=False)
        trace = msgspec.json.decode(raw)
    except (AttributeError, RuntimeError, TypeError, msgspec.DecodeError) as error:
        return [f"the flight recorder has nothing: {error}"]
    return [
        f"{e.get('process_group')} #{e.get('collective_seq_id')} {e.get('profiling_name')}: "
        f"{e.get('state')}"
        for e in trace.get("entries", [])[-8:]
    ]
