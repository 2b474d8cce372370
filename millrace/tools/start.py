"""The start of a program in the sandbox, its limits, and the talk with it until its end."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from millrace.errors import EpisodeError
from millrace.process.channel import write_all
from millrace.process.death import kill_group
from millrace.process.spawn import close, isolated, spawn_waited

SILENT = "its watcher ended without a word"
GRACE_S = 30.0
"""Seconds that building the walls and ending the program may take beyond the wall limit."""
_MB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a program."""

    wall_s: float = 10.0
    cpu_s: int = 10
    """Seconds of CPU time for each process."""
    memory: int = 512 * _MB
    """Bytes of address space for each process, and of memory for all of them together."""
    processes: int = 32
    """Processes and threads at once."""
    disk: int = 32 * _MB
    """Bytes of the working folder. With the level `process`, bytes of each file."""
    output: int = 1 * _MB
    """Bytes of stdout and stderr together."""
    address: int | None = None
    """Bytes of address space for each process, if that is not `memory`. -1 sets no limit."""


class Running:
    """A program in the sandbox. Its pipes are open until `end`."""

    def __init__(self, process: asyncio.subprocess.Process, life: int, status: int) -> None:
        self.process = process
        self._life: int | None = life
        self._status = status

    async def end(self) -> dict[str, Any]:
        """End whatever still runs, and return the watcher's last words: empty if it has none."""
        self.release()
        try:
            await asyncio.wait_for(self.process.wait(), GRACE_S)
        except TimeoutError:
            kill_group(self.process.pid)
            await asyncio.wait_for(self.process.wait(), GRACE_S)
        await close(self.process)
        line = os.read(self._status, 65536) if self._status >= 0 else b""
        with suppress(OSError):
            os.close(self._status)
        self._status = -1
        words: dict[str, Any] = json.loads(line.partition(b"\n")[0] or b"{}")
        return words

    def release(self) -> None:
        """Tell the watcher to end everything. It needs no event loop."""
        if self._life is not None:
            os.close(self._life)
            self._life = None


async def start(
    spec: dict[str, Any], limits: Limits, streams: tuple[int, int, int], variables: dict[str, str]
) -> Running:
    """Start the program of a spec, which `inside.py` reads. Raises EpisodeError("sandbox")."""
    address = limits.memory if limits.address is None else limits.address
    env = _environment(spec["folder"]) | variables
    spec = {**asdict(limits), "address": address, "files": 4096, "env": env, **spec}
    life_end, life = os.pipe()
    status, status_end = os.pipe()
    try:
        command = isolated("millrace.tools.inside.main", str(life_end), str(status_end))
        ends = life_end, status_end
        process = await spawn_waited(
            command, {}, streams, pass_fds=ends, cwd="/", limit=limits.output
        )
    finally:
        os.close(life_end)
        os.close(status_end)
    running = Running(process, life, status)
    line = json.dumps(spec).encode() + b"\n"
    try:
        await asyncio.wait_for(asyncio.to_thread(write_all, life, line), GRACE_S)
    except (TimeoutError, BrokenPipeError) as error:
        words, slow = await running.end(), isinstance(error, TimeoutError)
        told = f"it did not start within {GRACE_S:g} s" if slow else SILENT
        raise EpisodeError("sandbox", words.get("failed", told)) from None
    return running


def _environment(folder: str) -> dict[str, str]:
    """Return the whole environment of a program. Nothing of the driver's is in it."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


async def talk(
    running: Running, stdin: str, limits: Limits
) -> tuple[dict[str, Any], tuple[bytes, bytes], str]:
    """Send the input, read the output, and end the program.

    Return the watcher's words, the outputs, and the limit that this side noticed, or "".
    """
    kept, room, reason = (bytearray(), bytearray()), limits.output, ""
    process = running.process

    async def read(stream: asyncio.StreamReader, into: bytearray) -> None:
        nonlocal room, reason
        while piece := await stream.read(65536):
            into += piece[: max(room, 0)]
            room -= len(piece)
            if room < 0:  # the rest is read and dropped, so that the pipe closes
                reason = "output"
                running.release()

    async def write(stream: asyncio.StreamWriter) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            stream.write(stdin.encode(errors="replace"))
            await stream.drain()
        stream.close()

    assert process.stdin and process.stdout and process.stderr
    parts = [read(process.stdout, kept[0]), read(process.stderr, kept[1]), write(process.stdin)]
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        limit = limits.wall_s + GRACE_S
        _, late = await asyncio.wait(tasks[:2], timeout=limit)
        reason = reason or ("wall" if late else "")
    finally:
        for task in tasks:
            task.cancel()
        words = await running.end()
    return words, (bytes(kept[0]), bytes(kept[1])), reason
