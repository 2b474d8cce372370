"""The outputs for metrics in the run's folder: metrics.jsonl, and TensorBoard by default."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from millrace.observe.files import Appender
from millrace.process.files import replace_file


class Sink(Protocol):
    def write(self, version: int, row: dict[str, float]) -> None:
        """Write a row. Raises OSError if the disk refuses it. The next call tries again."""

    def close(self, complete: bool = True) -> None:
        """End the sink. `complete` says whether the run is at its end."""


class JsonLines:
    """A file with one row for each version and each validation, flushed at once.

    A resumed run removes the rows that it makes again.
    """

    def __init__(self, path: Path, resumed_from: int | None) -> None:
        if resumed_from is not None and path.is_file():
            rows = [x for x in path.read_bytes().splitlines() if _version_of(x) <= resumed_from]
            replace_file(path, b"".join(row + b"\n" for row in rows))
        self._file = Appender(path, durable=False)

    def write(self, version: int, row: dict[str, float]) -> None:
        clean = {k: v if math.isfinite(v) else None for k, v in row.items()}  # JSON has no NaN
        self._file.add(json.dumps({"version": version, **clean}).encode() + b"\n")

    def close(self, complete: bool = True) -> None:
        self._file.catch_up()


def _version_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["version"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf  # A crash cut this line off, or it is no row.


class TensorBoard:
    """Event files for TensorBoard, written without torch or TensorFlow.

    A resumed run marks the steps that it repeats.
    """

    def __init__(self, folder: Path, resumed_from: int | None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))
        if resumed_from is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(
                self._event(step=resumed_from + 1, wall_time=time.time(), session_log=start)
            )

    def write(self, version: int, row: dict[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._writer.add_event(
            self._event(step=version, wall_time=time.time(), summary=self._summary(value=values))
        )

    def close(self, complete: bool = True) -> None:
        self._writer.close()


def make_sinks(run_dir: Path, loggers: Sequence[str], resumed_from: int | None) -> list[Sink]:
    """Return the sinks in the run's folder: metrics.jsonl, and TensorBoard if `loggers` names it."""
    sinks: list[Sink] = [JsonLines(run_dir / "metrics.jsonl", resumed_from)]
    if "tensorboard" in loggers:
        sinks.append(TensorBoard(run_dir / "tensorboard", resumed_from))
    return sinks
