"""`millrace watch`: a live view of a run, made from its folder alone."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from millrace.cli.console import Json, print_json
from millrace.errors import bad_value
from millrace.observe.files import changed
from millrace.observe.panel import panel
from millrace.persist import ownership
from millrace.persist.run_reader import EXAMPLE, RunReader, load
from millrace.report.live.look import AdviceCache, look_at

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
    counsel = AdviceCache(reader)
    if json_:
        look = look_at(reader)
        print_json({**asdict(look), "advice": counsel.on(look)})
    elif once or not console.is_terminal:
        look = look_at(reader)
        console.print(panel(look, counsel.on(look), console.width))
    else:
        _live(reader, counsel, console, interval)


def _live(reader: RunReader, counsel: AdviceCache, console: Console, interval: float) -> None:
    """Redraw until the run ends or Ctrl-C. The last picture stays on the terminal."""
    ended = 0
    look = look_at(reader)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(panel(look, counsel.on(look), console.width), refresh=True)
                ended = ended + 1 if look.ended else 0
                if ended == _LOOKS_AT_THE_END:
                    break
                time.sleep(interval)
                look = look_at(reader)
    except KeyboardInterrupt:
        pass
    console.print(panel(look, counsel.on(look), console.width))


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
