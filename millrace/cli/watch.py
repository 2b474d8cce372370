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
from millrace.pipeline import ownership
from millrace.report.live.counsel import Counsel
from millrace.report.live.look import Looker, changed
from millrace.report.live.watch_view import panel

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
    looker, console = Looker(folder_of(run)), Console()
    counsel = Counsel(looker.folder)
    if json_:
        look = looker.look()
        print_json({**asdict(look), "advice": counsel.on(look)})
    elif once or not console.is_terminal:
        look = looker.look()
        console.print(panel(look, counsel.on(look), console.width))
    else:
        _live(looker, counsel, console, interval)


def _live(looker: Looker, counsel: Counsel, console: Console, interval: float) -> None:
    """Redraw until the run ends or Ctrl-C. The last picture stays on the terminal."""
    ended = 0
    look = looker.look()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(panel(look, counsel.on(look), console.width), refresh=True)
                ended = ended + 1 if look.ended else 0
                if ended == _LOOKS_AT_THE_END:
                    break
                time.sleep(interval)
                look = looker.look()
    except KeyboardInterrupt:
        pass
    console.print(panel(look, counsel.on(look), console.width))


def folder_of(run: Path | None) -> Path:
    """Return the folder of a run, or of the newest one. Raises ConfigError if there is none."""
    if run is None:
        return _newest(Path("runs"))
    if not os.path.isdir(run):
        rule = "is a file" if os.path.exists(run) else f"no such folder (from {Path.cwd()})"
        raise bad_value("RUN", str(run), rule, "a folder such as runs/quickstart-1")
    if not (ownership.is_ours(run) or os.path.isfile(run / "metrics.jsonl")):
        rule = "is not the folder of a run: it has no .millrace-run"
        raise bad_value("RUN", str(run), rule, "a folder such as runs/quickstart-1")
    return run


def _newest(root: Path) -> Path:
    """Return the run in `root` that was locked last. An evaluation locks nothing."""
    locks = [(changed(lock), lock.parent) for lock in root.glob("*/.lock")]
    if not locks:
        raise bad_value(
            "RUN", "", f"{root.absolute()} has no run", "a folder such as runs/quickstart-1"
        )
    return max(locks)[1]
