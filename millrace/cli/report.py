"""`millrace report`: what a run did, as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.console import Json, report


def report_page(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="A run folder, or several to compare")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The file to write. By default RUN/report.html, or report.html in the current "
            "folder for several runs.",
            show_default=False,
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Write the report of a run, or of the comparison of several, as one HTML file.

    A browser opens the file. Nothing in it comes from another host.

    Example: millrace report runs/quickstart-1
    """
    from millrace.report.page.write import write_report

    path = write_report(runs, output)
    size = path.stat().st_size
    report(json_, {"report": str(path), "bytes": size}, f"{path} ({size / 1e6:.1f} MB)")
