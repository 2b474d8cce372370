"""The process that draws and writes a trace: `python -m millrace.report.trace.process ...`.

It reads frames of events from its standard input until the run ends. If the run is killed, the file
stays without its end, and Perfetto opens it all the same. If the trace ends earlier, the process
says why on its standard output, and exits.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

import millrace
from millrace.report.trace.files import TraceFiles, TraceIsFull

_SIZE = struct.Struct("<I")
_NICE = 10
"""The run goes first."""
_PASSED = ("LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "TZ")


class Frame(msgspec.Struct, array_like=True):
    """Events in order, and the run's clock when they were sent."""

    now: float
    events: list[Any]
    """The fields of each Event."""
    last: bool = False
    """Whether the run ended in order."""


def start(
    folder: Path, attempt: int, zero: float, unix_s: float, limit: int, full: int
) -> subprocess.Popen[bytes]:
    """Start the process. Its arguments are those of TraceFiles."""
    numbers = map(repr, (attempt, zero, unix_s, limit, full))
    root = str(Path(millrace.__file__).parent.parent)
    given = {name: os.environ[name] for name in _PASSED if name in os.environ}
    path = os.pathsep.join(filter(None, [root, given.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(folder), *numbers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=given | {"PYTHONPATH": path},
    )


def send(pipe: BinaryIO, frame: bytes) -> None:
    """Send one frame. Raises BrokenPipeError if the process has ended."""
    pipe.write(_SIZE.pack(len(frame)) + frame)
    pipe.flush()


def write(pipe: BinaryIO, files: TraceFiles) -> None:
    """Write the frames that come, until the last one, or until the run is gone."""
    decode = msgspec.msgpack.Decoder(Frame).decode
    while len(head := pipe.read(_SIZE.size)) == _SIZE.size:
        (size,) = _SIZE.unpack(head)
        if len(data := pipe.read(size)) < size:
            return
        frame = decode(data)
        files.add(frame.events, frame.now)
        if frame.last:
            files.finish(frame.now)
            return


def main(arguments: Sequence[str]) -> str:
    """Write a trace. Return why it ended before the run."""
    folder, attempt, zero, unix_s, limit, full = arguments
    try:
        files = TraceFiles(
            Path(folder), int(attempt), float(zero), float(unix_s), int(limit), int(full)
        )
        write(sys.stdin.buffer, files)
    except TraceIsFull:
        return (
            f"the traces of all attempts have {int(limit) >> 20} MiB. "
            "report.trace_mb sets this limit"
        )
    except OSError as error:
        return f"it cannot be written: {error.strerror or error}"
    except Exception as error:  # noqa: BLE001 - the run has no other way to learn of it
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # for the driver, which saves
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    sys.stdout.write(main(sys.argv[1:]))
