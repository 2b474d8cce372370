"""`millrace check-algorithm`: the conformance checks of a user's loss or advantage estimator."""

from __future__ import annotations

from typing import Annotated

import typer

from millrace.cli.console import Json, report
from millrace.config.layers import settings_of


def check_algorithm(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION", help="path.py:name or module:name of a loss or an estimator."
        ),
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]...", help="Options of the loss.", show_default=False),
    ] = None,
    json_: Json = False,
) -> None:
    """Check a loss or an advantage estimator of your own, on made-up batches.

    The checks are: masks, micro-batches, ranks, the order of trajectories, gradients against finite
    differences, dtypes, extreme log-probs, and the facts that it declares.

    Example: millrace check-algorithm my_loss.py:my_loss beta=0.2
    """
    from millrace.run import algorithms

    key, found = algorithms.check(spec, dict(settings_of(options or [])))
    holds = ["every property holds", f"use it: millrace train RECIPE {key}={spec}"]
    lines = [f"broken  {finding}" for finding in found] or holds
    result = {
        "key": key,
        "broken": [{"property": f.name, "seen": f.seen, "fix": f.fix} for f in found],
    }
    report(json_, result, "\n".join(lines))
    if found:
        raise typer.Exit(1)
