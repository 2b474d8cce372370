"""The start of a run: whom it waits for while it lasts, and where its seconds went.

`RUN/start.jsonl` gets a line for each attempt. Its times are seconds since the command began.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from millrace.observe.files import Appender
from millrace.observe.progress import Progress
from millrace.run.engines import Engines
from millrace.runtime.caches import cache_folder
from millrace.sync.background import abandonable
from millrace.waits.answer import ProcessStatus
from millrace.waits.graph import DRIVER
from millrace.waits.registry import Start, at, starting, take_starts

T = TypeVar("T")

FILE = "start.jsonl"
ENGINES, SYNC, WARM_UP = "starting engines", "first weight sync", "warm-up"
_LOOK_S = 4.0
_SHORTEST_S = 0.05
"""Seconds of a part that is worth a word."""

Parts = Mapping[str, Sequence[Start]]
"""The parts of the start of each process."""


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run `work` beside the body. The end of the body ends it, and an error of the body counts."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # Who awaited the task has raised it.


async def part(what: str, work: Awaitable[T]) -> T:
    """Await `work` as a part of the start."""
    with starting(what):
        return await work


@contextlib.asynccontextmanager
async def shown(
    progress: Progress, ask: Callable[[], Sequence[ProcessStatus]]
) -> AsyncIterator[None]:
    """Show whom the run waits for, until it trains."""
    progress.phase(ENGINES)
    async with beside(_show(progress, ask)):
        yield


async def _show(progress: Progress, ask: Callable[[], Sequence[ProcessStatus]]) -> None:
    while progress.state.phase != "training":
        await asyncio.sleep(_LOOK_S)
        if (phase := progress.state.phase).startswith((ENGINES, SYNC)):
            waits = waiting_for(await abandonable(ask))
            if progress.state.phase == phase:
                progress.phase(phase, note=f"({waits})" if waits else "")


def waiting_for(answers: Iterable[ProcessStatus]) -> str:
    """Return the newest work of each process with its seconds, the driver's without workers."""
    works = {
        answer.name: min((w for w in answer.waits if w.work), key=lambda w: w.seconds, default=None)
        for answer in answers
    }
    others = {name: work for name, work in works.items() if work and name != DRIVER}
    return ", ".join(
        f"{name}: {work.what} since {work.seconds:.0f} s"
        for name, work in (others or works).items()
        if work is not None
    )


async def report(engines: Engines, run: Path, version: int, note: Callable[[str], None]) -> float:
    """Write where the seconds of the start went: to the file, to the trace and to the terminal.

    Returns the seconds, without those of the warm-up.
    """
    parts = {DRIVER: take_starts()} | await engines.starts()
    parts = {
        name: [p for p in each if p.end - p.begin >= _SHORTEST_S] for name, each in parts.items()
    }
    began = min((p.begin for each in parts.values() for p in each), default=0.0)
    parts = {
        name: [Start(p.what, round(p.begin - began, 2), round(p.end - began, 2)) for p in each]
        for name, each in parts.items()
        if each
    }
    seconds = seconds_of(parts)
    at("run", "started", seconds=seconds, **{n: shown_parts(e) for n, e in parts.items()})
    line = {"version": version, "seconds": seconds, "parts": parts}
    try:
        Appender(run / FILE, durable=False).add(msgspec.json.encode(line) + b"\n")
    except OSError as error:  # a full disk delays other files, and ends no run either
        note(f"{run / FILE} is not written: {error}")
    note(f"start {seconds:.1f} s. Its parts, in seconds since the command:")
    for text in lines(parts):
        note(text)
    if any(p.what == "compile" for each in parts.values() for p in each):
        note(f"  compiled code is kept in {cache_folder()}")
    return seconds


def seconds_of(parts: Parts) -> float:
    """Return the seconds from the command to the end of the last part, without the warm-up."""
    warm_up = sum(p.end - p.begin for p in parts.get(DRIVER, ()) if p.what == WARM_UP)
    return round(max((p.end for each in parts.values() for p in each), default=0.0) - warm_up, 2)


def lines(parts: Parts) -> list[str]:
    """Return a line for the driver, and for the slowest process of each other kind."""
    found = []
    for _, names in groupby(sorted(parts, key=_kind), _kind):
        alike = list(names)
        slowest = max(alike, key=lambda name: parts[name][-1].end)
        of = f" (the slowest of {len(alike)})" if len(alike) > 1 else ""
        found.append(f"  {slowest + of:<12} {shown_parts(parts[slowest])}")
    return found


def _kind(name: str) -> tuple[bool, str]:
    """Return what processes have in common that differ by their numbers alone."""
    return name != DRIVER, "".join(c for c in name if not c.isdigit())


def shown_parts(parts: Sequence[Start]) -> str:
    return ", ".join(
        f"{p.what} {p.begin:.1f}-{p.end:.1f}" for p in sorted(parts, key=lambda p: p.begin)
    )
