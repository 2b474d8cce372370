"""`millrace why`: what a run waits for, and who holds it up."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from millrace.cli.console import Json, print_json, warn
from millrace.cli.watch import RunFolder, folder_of
from millrace.persist.run_reader import RunReader
from millrace.waits import kernel
from millrace.waits.ask import ask, gone, processes
from millrace.waits.graph import DRIVER
from millrace.waits.verdict import PATIENCE_S, Verdict, judge, report

_TAIL = 3


def why(
    run: RunFolder = None,
    patience: Annotated[
        float, typer.Option(min=0.1, help="Seconds without progress that count as standing still.")
    ] = PATIENCE_S,
    full: Annotated[
        bool, typer.Option("--full", help="Print all waits and the stacks of all processes too.")
    ] = False,
    json_: Json = False,
) -> None:
    """Say what a run waits for, and who holds it up.

    It asks every process of the run, also one whose event loop is blocked. The kernel says what is
    known of a process that does not answer.

    The exit code is 0 if the run moves or is over, and 1 if it stands still or is dead.

    Example: millrace why runs/quickstart-1
    """
    folder = folder_of(run)
    verdict = verdict_on(folder, patience)
    warn(RunReader(folder).read())
    if json_:
        print_json(msgspec.to_builtins(verdict))
    elif full:
        typer.echo(report(verdict), nl=False)
    else:
        typer.echo(verdict.sentence)
        for other in verdict.others:
            typer.echo(f"stands still: {other}")
        if verdict.next:
            typer.echo(f"Next: {verdict.next}.")
    if verdict.state in ("still", "dead"):
        raise typer.Exit(1)


def verdict_on(run: Path, patience_s: float = PATIENCE_S) -> Verdict:
    """Ask a run, and judge it."""
    driver = next((p for p in processes(run) if p["name"] == DRIVER), None)
    if driver is None:
        return _over(run)
    if driver["host"] != socket.gethostname():
        text = f"the driver runs on {driver['host']}"
        return Verdict("unknown", f"{text}.", f"run `millrace why {run}` there")
    if gone(kernel.look([driver["pid"]])[driver["pid"]]):
        return _dead(run, driver["pid"])
    return judge(ask(run), patience_s)


def _over(run: Path) -> Verdict:
    reader = RunReader(run).read()
    if reader.state == "complete" and not reader.history:
        return Verdict("over", f"{reader.process}.")
    if reader.state == "gone":
        ended = f"{reader.process}."
        return Verdict("dead", ended, f"read {run / 'logs'}, then {_resume(run)}", DRIVER, "dead")
    if reader.state == "complete":
        return Verdict("over", "the run is over: it has trained and validated everything.")
    if reader.state == "starting":
        sentence = f"the run starts, and its processes do not answer yet: {reader.process}."
        return Verdict("starting", sentence, "ask again in a few seconds")
    if reader.state == "stopped":
        version = reader.history[-1].version
        return Verdict(
            "over", f"the run was stopped at version {version}.", f"to continue, {_resume(run)}"
        )
    return Verdict("over", "no process of the run is there: it stopped, or it has not begun.")


def _dead(run: Path, pid: int) -> Verdict:
    """Return the verdict on a run whose driver died without an end."""
    logs = sorted((run / "logs").glob("*.log"), key=lambda p: p.stat().st_mtime)
    said = ""
    if logs:
        lines = logs[-1].read_text(errors="replace").splitlines()[-_TAIL:]
        said = f" The last lines, of {logs[-1].name}: {' | '.join(lines)}" if lines else ""
    sentence = f"the driver (process {pid}) died without an end: killed, or out of memory.{said}"
    return Verdict("dead", sentence, f"{_resume(run)}, or `dmesg` first", DRIVER, "dead")


def _resume(run: Path) -> str:
    return f"`millrace train RECIPE trainer.run_dir={shlex.quote(str(run))} trainer.resume=auto`"
