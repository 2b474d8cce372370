"""`millrace simulate`: runs with faults, on a virtual clock."""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from millrace.cli.console import Json, open_console, report
from millrace.errors import bad_value

_SHOWN = 5
"""Seeds with a violation whose stories are printed."""


def simulate(
    faults: Annotated[
        bool, typer.Option("--faults", help="Let workers, links and the disk fail, as always.")
    ] = True,
    seeds: Annotated[
        str, typer.Option(metavar="A..B", help="The seeds A to B. One seed prints its story.")
    ] = "0..300",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    json_: Json = False,
) -> None:
    """Simulate small runs with faults, and check what millrace promises after every event.

    The loops, the Ledger, the calls to workers, checkpoints and resumes are the real ones. Engines,
    links, the disk and the clock are simulated. A seed draws the run and its faults, and replays
    them exactly. A seed that breaks a promise is shrunk to the fewest faults, and its story is
    printed. The exit code is then 1.

    Example: millrace simulate --faults --seeds 0..1000
    """
    first, last = _range(seeds)
    from millrace.extras.faults.sweep import Found

    found = Found()
    try:
        _sweep(range(first, last + 1), jobs, found, json_)
    finally:
        _report(found, last + 1 - first, json_)
    if found.violations:
        raise typer.Exit(1)


def _range(seeds: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?", seeds)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if last < first:
        rule = "must be a number, or A..B with A up to B"
        raise bad_value("--seeds", seeds, rule, "--seeds 0..300")
    return first, last


def _sweep(seeds: range, jobs: int, found: Any, json_: bool) -> None:
    """Run all seeds with a progress bar, and add their outcomes to `found`."""
    from millrace.extras.faults.sweep import sweep

    columns = (
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("seeds, {task.fields[broken]} with a violation"),
        TimeRemainingColumn(),
    )
    console = open_console(json_)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(seeds), broken=0)
        for outcome in sweep(seeds, min(jobs, os.cpu_count() or 1)):
            found.add(outcome)
            progress.update(task, advance=1, broken=len(found.violations))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _report(found: Any, asked: int, json_: bool) -> None:
    """Report what the seeds showed, also after Ctrl-C, and the stories of broken ones."""
    from millrace.extras.faults.scenario import draw
    from millrace.extras.faults.sweep import shrink, story

    stopped = sys.exc_info()[0] is not None
    stories: dict[int, list[str]] = {}
    broken = sorted(found.violations)[:_SHOWN]
    if asked == 1 and found.seeds:
        broken = [next(iter(found.violations), found.last)]
    for seed in [] if stopped else broken:
        stories[seed] = story(*shrink(draw(seed)))
    fired = dict(sorted(found.fired.items()))
    result = {
        "complete": found.seeds == asked,
        "seeds": found.seeds,
        "attempts": found.attempts,
        "virtual_hours": found.virtual_s / 3600,
        "faults": fired,
        "violations": {str(seed): text for seed, text in sorted(found.violations.items())},
        "stories": {str(seed): lines for seed, lines in stories.items()},
    }
    text = [line for lines in stories.values() for line in lines]
    text += [f"seed {s}: {v}" for s, v in sorted(found.violations.items()) if s not in stories]
    note = "" if found.seeds == asked else f" of {asked}, stopped"
    text.append(
        f"{_counted(found.seeds, 'seed')}{note}: {len(found.violations)} with a violation, "
        f"{_counted(sum(fired.values()), 'fault')} of {_counted(len(fired), 'kind')}, "
        f"{_counted(found.attempts, 'attempt')}, "
        f"{found.virtual_s / 3600:.1f} virtual hours"
    )
    report(json_, result, "\n".join(text))
