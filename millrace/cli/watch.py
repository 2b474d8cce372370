"""`millrace watch` and `why`: a live view of a run, what it waits for, and who holds it up."""

from __future__ import annotations

import os
import shlex
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.live import Live

from millrace.cli.console import Json, print_json, warn
from millrace.errors import bad_value
from millrace.observe.files import changed
from millrace.observe.panel import panel
from millrace.persist import ownership
from millrace.persist.run_reader import EXAMPLE, RunReader, load
from millrace.report.advice import advise
from millrace.report.live.look import look_at
from millrace.waits.ask import ask, driver_of, lives
from millrace.waits.graph import DRIVER
from millrace.waits.verdict import PATIENCE_S, Verdict, judge, report

RunFolder = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="A run folder. Without it, the newest run in runs/.",
        show_default=False,
    ),
]
_LOOKS_AT_THE_END = 2
"""Looks that must agree on the end: a file of a shared folder may come late."""


def watch(
    run: RunFolder = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print the run as it is now, and exit.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between looks.")] = 2,
    json_: Json = False,
) -> None:
    """Show a run as it goes, also from another machine that shares its folder.

    It reads files only. It ends with the run, or by Ctrl-C, which the run does not notice.

    Output that is no terminal gets one look, as --once does.

    Example: millrace watch runs/quickstart-1
    """
    reader, console = RunReader(folder_of(run)), Console()
    if json_:
        look = look_at(reader)
        print_json({**asdict(look), "advice": [str(one) for one in advise(reader)]})
    elif once or not console.is_terminal:
        look = look_at(reader)
        console.print(panel(look, [str(one) for one in advise(reader)], console.width))
    else:
        _live(reader, console, interval)


def _live(reader: RunReader, console: Console, interval: float) -> None:
    """Redraw until the run ends or Ctrl-C. The last picture stays on the terminal."""
    ended, look = 0, look_at(reader)

    def picture() -> RenderableType:
        return panel(look, [str(one) for one in advise(reader, wait=False)], console.width)

    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(picture(), refresh=True)
                ended = ended + 1 if look.ended else 0
                if ended == _LOOKS_AT_THE_END:
                    break
                time.sleep(interval)
                look = look_at(reader)
    except KeyboardInterrupt:
        pass
    console.print(picture())


def folder_of(run: Path | None) -> Path:
    """Return the folder of a run, or of the newest one. Raises ConfigError if there is none."""
    if run is None:
        return _newest(Path("runs"))
    if not os.path.isdir(run):
        rule = "is a file" if os.path.exists(run) else f"no such folder (from {Path.cwd()})"
        raise bad_value("RUN", str(run), rule, EXAMPLE)
    if not (ownership.is_ours(run) or os.path.isfile(run / "metrics.jsonl")):
        rule = "is not the folder of a run: it has no .millrace-run"
        raise bad_value("RUN", str(run), rule, EXAMPLE)
    if not ownership.is_ours(run):
        load(run)  # its lines are a run's, or this refuses it
    return run


def _newest(root: Path) -> Path:
    """Return the run in `root` that was locked last. An evaluation locks nothing."""
    locks = [(changed(lock), lock.parent) for lock in root.glob("*/.lock")]
    if not locks:
        raise bad_value("RUN", "", f"{root.absolute()} has no run", EXAMPLE)
    return max(locks)[1]


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
    if (driver := driver_of(run)) is None:
        return _over(run)
    if driver["host"] != socket.gethostname():
        text = f"the driver runs on {driver['host']}"
        return Verdict("unknown", f"{text}.", f"run `millrace why {run}` there")
    if not lives(driver):
        return _dead(run, driver["pid"])
    return judge(ask(run), patience_s)


def _over(run: Path) -> Verdict:
    reader = RunReader(run).read()
    state, process = reader.state, reader.process
    if state == "complete":
        whole = "the run is over: it has trained and validated everything"
        return Verdict("over", f"{whole if reader.history else process}.")
    if state == "gone":
        then = f"read {run / 'logs'}, then {_resume(run)}"
        return Verdict("dead", f"{process}.", then, DRIVER, "dead")
    if state == "starting":
        sentence = f"the run starts, and its processes do not answer yet: {process}."
        return Verdict("starting", sentence, "ask again in a few seconds")
    if state == "stopped":
        sentence = f"the run was stopped at version {reader.history[-1].version}."
        return Verdict("over", sentence, f"to continue, {_resume(run)}")
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
