"""`millrace scale`: another number of replicas for a running run."""

from __future__ import annotations

import re
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from millrace.cli.console import Json, report
from millrace.cli.watch import folder_of
from millrace.errors import DeadlineError, MillraceError, bad_value
from millrace.persist.run_reader import RunReader
from millrace.process.files import replace_file
from millrace.replicas.scaling import ANSWER, REQUEST, Reply, Request
from millrace.waits.ask import Told, driver_of, lives
from millrace.waits.wait_server import FOLDER

_POLL_S = 0.1
_ANSWER_S = 120.0
"""How long the start and the end of workers may take."""


def scale(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a running run")],
    change: Annotated[str, typer.Argument(metavar="rollout=N", help="The number of replicas")],
    wait: Annotated[bool, typer.Option(help="Wait until the new replicas serve.")] = True,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds to wait until they serve.")] = 300,
    json_: Json = False,
) -> None:
    """Change the number of rollout replicas of a running run. Nothing else restarts.

    A replica that joins serves from the next weight sync on. On a Ray cluster it takes free
    devices of any node. The newest command counts, and sets rollout.max_replicas to its number. A
    resumed run starts with the number of its configuration.

    Example: millrace scale runs/quickstart-1 rollout=2
    """
    count = count_of(change)
    driver = running(run)
    request = Request(uuid.uuid4().hex, count, deadline if wait else 0.0)
    folder = run / FOLDER
    file = folder / f"{request.id}{REQUEST}"
    try:
        replace_file(file, msgspec.json.encode(request))
    except OSError as error:
        raise MillraceError(f"{file}: {error.strerror}. The run may have ended") from error
    if wait:
        serve = "replica serves" if count == 1 else "replicas serve"
        typer.echo(f"waiting until {count} {serve} ...", err=True)
    reply = wait_for(file, deadline + _ANSWER_S, lambda: driver_of(run) == driver)
    if reply.error:
        raise MillraceError(reply.error)
    noun = "replica" if reply.after == 1 else "replicas"
    text = f"scaled from {reply.before} to {reply.after} {noun} after {reply.seconds:.1f} s"
    if not reply.serving:
        text += ". Not all of them serve yet: they begin at a weight sync"
    report(json_, msgspec.to_builtins(reply), text)


def count_of(change: str) -> int:
    """Return N of `rollout=N`."""
    key, equals, value = change.partition("=")
    if not equals:
        fix = f"rollout={change}" if change.isdecimal() else "rollout=2"
        raise bad_value("rollout=N", change, "must be of the form rollout=N", fix)
    if key != "rollout":
        raise bad_value(key, value, "only the replicas of a running run can change", "rollout=2")
    if not re.fullmatch("[0-9]{1,4}", value) or int(value) < 1:
        raise bad_value(key, value, "must be an integer from 1 to 9999", "rollout=2")
    return int(value)


def running(run: Path) -> Told:
    """Return the driver of a run. Raises ConfigError unless it lives on this machine."""
    driver = driver_of(folder_of(run))
    if driver is not None and driver["host"] != socket.gethostname():
        rule = f"the driver runs on {driver['host']}"
        raise bad_value("RUN", str(run), rule, f"`millrace scale {run}` there")
    if driver is None or not lives(driver):
        if RunReader(run).read().state == "starting":
            rule = "the run has not started its workers yet, or its start has failed"
            raise bad_value("RUN", str(run), rule, f"wait until `millrace watch {run}` has figures")
        raise bad_value("RUN", str(run), "the run does not run", "the folder of a running run")
    return driver


def wait_for(file: Path, deadline_s: float, same: Callable[[], bool]) -> Reply:
    """Wait for the answer to the request in `file`, while the driver is the `same`."""
    end, answer = time.monotonic() + deadline_s, file.with_suffix(ANSWER)
    while time.monotonic() < end:
        if answer.exists():
            reply = msgspec.json.decode(answer.read_bytes(), type=Reply)
            answer.unlink()
            return reply
        if not same():
            raise MillraceError("the run has ended before it answered")
        time.sleep(_POLL_S)
    file.unlink(missing_ok=True)
    raise DeadlineError(f"the driver did not answer within {deadline_s:g} s. See `millrace why`")
