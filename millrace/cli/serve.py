"""`millrace serve`: the report of a run as a page on this machine, which follows the run."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from typing import Annotated

import typer

from millrace.cli.watch import RunFolder, folder_of
from millrace.errors import INSTALL, MissingDependency


def serve(
    run: RunFolder = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")
    ] = 0,
) -> None:
    """Show the report of a run in a browser, and follow the run.

    The page is on 127.0.0.1 only. Its address has a new token each time. Ctrl-C ends it.

    Example: millrace serve runs/quickstart-1
    """
    try:
        from millrace.report.live import serve as server
    except ModuleNotFoundError as error:
        fix = INSTALL["fastapi"]
        raise MissingDependency(
            f"millrace serve needs {error.name}, which is not installed here. Fix: {fix}."
        ) from error
    folder, token = folder_of(run), secrets.token_urlsafe(24)
    with server.listen(port) as listening, suppress(KeyboardInterrupt):
        number = listening.getsockname()[1]
        typer.echo(f"http://{server.LOOPBACK}:{number}/{token}")
        typer.echo(
            f"from another machine: ssh -N -L {number}:{server.LOOPBACK}:{number} "
            f"{socket.gethostname()}, then the same address. Ctrl-C ends the page."
        )
        with suppress(OSError):
            os.nice(10)  # a report on the machine of the run waits for the run
        app = server.make_app(server.Pages(folder), token)
        server.server_of(app).run(sockets=[listening])
