"""The sections of a run's report, in their order."""

from __future__ import annotations

import gc
from typing import Any

from millrace.persist.run_reader import RunReader
from millrace.report.page import agents, curves, head, timeline, totals
from millrace.report.page.figures import missing, section, text
from millrace.report.page.lanes import Spans, columns
from millrace.report.page.samples import Table, read_table
from millrace.report.trace import spans


def of_run(run: RunReader) -> tuple[dict[str, Any], Table]:
    """Return the page of a run, and its samples without their texts."""
    table, found = read_table(run.path), _spans(run)
    run.notes += table.notes
    played = agents.agents(run)
    return {
        "title": f"{run.key('name', run.name)}: report of {run.name}",
        "keys": run.keys(),
        "sections": [
            section("run", "The run", [head.facts(run)]),
            section("alarms", "Alarms", head.alarms(run)),
            section("advice", "Advice", head.advice(run)),
            section("learning", "Learning", [curves.rewards(run), curves.validation(run)]),
            *([section("agents", "Agents", played)] if played else []),
            section("timeline", "Timeline", timeline.timeline(run, found)),
            section("devices", "Where the time went", totals.devices(run)),
            section("staleness", "Staleness", [curves.staleness(run)]),
            section("lengths", "Lengths", _lengths(run, found, table)),
            section("tokens", "Where the tokens went", [*totals.tokens(run), *head.errors(run)]),
            section("sync", "Weight syncs", [curves.syncs(run)]),
            section("samples", "Samples", [_samples(run, table)]),
        ],
    }, table


def _spans(run: RunReader) -> Spans:
    # A trace has millions of small objects. The collector would look at them again and again.
    on, n = gc.isenabled(), run.key("rollout.n")
    gc.disable()
    try:
        return columns(spans.read(run.path), n if isinstance(n, int) else 0)
    finally:
        if on:
            gc.enable()


def _lengths(run: RunReader, found: Spans, table: Table) -> list[dict[str, Any]]:
    """The samples lack those that an error dropped. The trace of a fast run has some samples only."""
    whole = found.every() == 1
    if len(found.lengths) and (whole or not len(table)):
        tokens, trained = found.lengths.T
        source = "all that ended, also dropped ones and those in flight" if whole else ""
        chart = curves.lengths(tokens, tokens[trained == 1], source)
    elif len(table):
        source = "all that RUN/samples/ has, also those that dynamic sampling dropped"
        chart = curves.lengths(table.tokens, table.tokens[table.trained], source)
    else:
        chart = missing("lengths of all finished responses", "the folder has no trace/ and no samples/.")  # fmt: skip
    return [chart, curves.length_curves(run)]


def _samples(run: RunReader, table: Table) -> dict[str, Any]:
    if len(table):
        return {"type": "browser"}
    if run.key("report.samples") == 0:
        return text("No samples: `report.samples=0`.")
    return text("No samples: the folder has no samples/. Runs of older versions have none.")
