"""`millrace query`: SQL on a run."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from millrace.cli.console import Json, print_json, warn
from millrace.errors import bad_value
from millrace.persist import ownership
from millrace.persist.history import FILE
from millrace.persist.run_reader import RunReader, check
from millrace.report import query as asking

_ROWS = 200
"""Rows on a terminal. --csv and --json print all of them."""
_WIDTH = 200
"""Characters of one value on a terminal."""


def query(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder")],
    sql: Annotated[
        str | None,
        typer.Argument(metavar="SQL", help="A query in DuckDB's SQL", show_default=False),
    ] = None,
    csv_: Annotated[
        Path | None,
        typer.Option(
            "--csv",
            metavar="FILE",
            help="Write a CSV file. - is standard output.",
            show_default=False,
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Ask a run with SQL. Without SQL, list its tables.

    The tables are metrics, validations, samples, spans, accounts and history.

    Example: millrace query runs/quickstart-1 'select version, "reward/mean" from metrics'
    """
    if not (
        ownership.is_ours(run) and (run / "samples").is_dir()
    ):  # `millrace eval` has no history
        check(run, FILE)
    reader = RunReader(run).read()
    if sql is None:
        if csv_ is not None:
            raise bad_value("SQL", "", "--csv needs a query", f"for example {asking.EXAMPLES[0]}")
        _list(reader, json_)
        return
    answer = asking.query(reader, sql)
    warn(reader)
    if csv_ is not None:
        _write_csv(csv_, answer)
    if json_:
        rows = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
        print_json({"columns": answer.columns, "rows": rows})
    elif csv_ is None:
        _show(answer)


def _list(run: RunReader, json_: bool) -> None:
    """Print every table with its columns, and two queries."""
    found = asking.tables(run)
    warn(run)
    if json_:
        known = {t.name: {"rows": t.rows, "columns": t.columns} for t in found}
        print_json({"tables": known, "examples": list(asking.EXAMPLES)})
        return
    table = Table(box=None)
    for title in ("table", "rows", "columns"):
        table.add_column(title, justify="right" if title == "rows" else "left")
    for t in found:
        table.add_row(t.name, f"{t.rows:,}", Text(", ".join(map(printable, t.columns))))
    console = Console()
    console.print(table)
    console.print("\nFor example:", highlight=False)
    for example in asking.EXAMPLES:
        console.print(f"  millrace query {run.path} '{example}'", highlight=False, soft_wrap=True)


def _show(answer: asking.QueryResult) -> None:
    """Print the first rows as a table, or one below another if the table is too wide."""
    console, rows = Console(), answer.rows[:_ROWS]
    names = [printable(column) for column in answer.columns]
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    table = Table(box=None, show_header=sum(widths) + 2 * len(widths) <= console.width)
    if table.show_header:
        for name in names:
            table.add_column(Text(name))
        for row in cells:
            table.add_row(*map(Text, row))
    else:
        for number, row in enumerate(cells, start=1):
            table.add_row(Text(f"row {number}", "bold"))
            for name, cell in zip(names, row, strict=True):
                table.add_row(Text(name), Text(cell))
    console.print(table)
    if len(answer.rows) > _ROWS:
        rest = len(answer.rows) - _ROWS
        console.print(f"{rest:,} more rows: --csv FILE or --json has all of them", highlight=False)


def _write_csv(path: Path, answer: asking.QueryResult) -> None:
    """Write all rows. The file may be outside of the run, so it is never replaced by accident."""
    if str(path) == "-":
        _write_rows(sys.stdout, answer)
        return
    try:
        with path.open("x", newline="", encoding="utf-8") as file:
            _write_rows(file, answer)
    except OSError as error:
        fix = "a new file in a folder that exists"
        raise ownership.unwritable(path, error, "--csv", fix) from None


def _write_rows(file: Any, answer: asking.QueryResult) -> None:
    writer = csv.writer(file)
    writer.writerow(answer.columns)
    writer.writerows(answer.rows)


def _cell(value: Any) -> str:
    """Return a value for a terminal: short, and without control characters."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = printable(str(value))
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def printable(text: str) -> str:
    """Return text with control characters escaped: a model may have written it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
