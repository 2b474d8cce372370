"""The start of a child process, in a session of its own unless it shares the terminal."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import millrace

ROOT = str(Path(millrace.__file__).parent.parent)


def isolated(function: str, *arguments: str) -> list[str]:
    """Return a command that calls `module.function` with nothing but the standard library."""
    module, _, name = function.rpartition(".")
    code = f"import sys; sys.path.append({ROOT!r}); from {module} import {name} as main; "
    return [sys.executable, "-I", "-S", "-c", f"{code}main(*sys.argv[1:])", *arguments]


def spawn(
    command: Sequence[str],
    variables: Mapping[str, str],
    output: int | None = None,
    *,
    stdin: int = subprocess.DEVNULL,
    fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process whose end the caller polls. `output` takes its stdout and its stderr."""
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=output,
        stderr=output,
        env=variables,
        pass_fds=fds,
        start_new_session=True,
    )


async def spawn_waited(
    command: Sequence[str],
    variables: Mapping[str, str],
    streams: tuple[int | None, int | None, int | None],
    *,
    session: bool = True,
    **options: Any,
) -> asyncio.subprocess.Process:
    """Start a process whose end the event loop waits for. `options` are those of asyncio."""
    stdin, stdout, stderr = streams
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=variables,
        start_new_session=session,
        **options,
    )


async def close(process: asyncio.subprocess.Process) -> None:
    """Close the pipes of a process that has ended. Its children may hold their other ends."""
    process._transport.close()  # type: ignore[attr-defined]
    await process.wait()
