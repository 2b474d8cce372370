"""The tables of a run for DuckDB: metrics, validations, samples, spans, accounts and history.

The files of a run and the SQL are untrusted. The SQL sees these tables and no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from millrace.errors import CheckpointError, bad_value, needed
from millrace.persist import accounts, history
from millrace.persist.run_reader import METRICS, RunReader

if TYPE_CHECKING:
    import pyarrow as pa

EXAMPLES = (
    'select version, "reward/mean", "staleness/mean" from metrics order by version desc limit 5',
    "select track, name, count(*) as n, sum(end_s - start_s) as seconds from spans "
    "group by all order by seconds desc limit 10",
)
MOST_ROWS = 2_000_000
"""The most rows of an answer: each takes memory here."""


@dataclass(frozen=True)
class QueryResult:
    """The rows of a query."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


@dataclass(frozen=True)
class Table:
    """A table of a run: its columns with their types, and the number of its rows."""

    name: str
    columns: dict[str, str]
    rows: int


def query(run: RunReader, sql: str) -> QueryResult:
    """Return the answer to `sql`. Raise ConfigError if it is wrong.

    Only the tables whose names are in the text are read. What they lack is in `run.notes`.
    """
    duckdb, words = needed("duckdb", "millrace query"), set(re.findall(r"\w+", sql.lower()))
    try:
        with _open(duckdb, run, [name for name in TABLES if name in words]) as connection:
            if len(connection.extract_statements(sql)) > 1:
                raise bad_value("SQL", sql, "has more than one statement", "one query at a time")
            answer = _interruptible(connection, sql)
    except duckdb.Error as error:
        fix = f"SQL on the tables {', '.join(TABLES)}"
        if name := re.search(r"(?<![\"'\w/])[A-Za-z_]\w*(/[\w@]+)+(?![\"'\w/])", sql):
            fix = f'"{name[0]}" in double quotes, if it is one name'
        text, _, _ = str(error).partition("LINE 1:")  # without the copy of the query
        text = re.split(r'Did you mean "(?:pg|sqlite|duckdb)_', text)[0]  # DuckDB's own tables
        rule = " ".join(text.split()).rstrip(".!?")[:500]
        raise bad_value("SQL", sql, rule, fix) from None
    if answer is None:
        raise bad_value("SQL", sql, "has no statement", f"for example {EXAMPLES[0]}")
    if len(answer.rows) > MOST_ROWS:
        rule = f"has more than {MOST_ROWS:,} rows"
        raise bad_value("SQL", sql, rule, "a limit, such as: limit 1000")
    return answer


def _interruptible(connection: Any, sql: str) -> QueryResult | None:
    """Return the answer, or None if there is no statement. Ctrl-C ends the query.

    DuckDB does not look at signals while it works, so it works in a thread.
    """

    def ask() -> QueryResult | None:
        result = connection.execute(sql)
        if result is None:
            return None
        columns = [column[0] for column in result.description or ()]
        return QueryResult(columns, result.fetchmany(MOST_ROWS + 1) if columns else [])

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            return asked.result()
        except BaseException:
            while not asked.done():  # an interrupt before the query begins has no effect
                connection.interrupt()
                wait([asked], 0.05)
            raise


def tables(run: RunReader) -> list[Table]:
    """Return all tables of the run. What they lack is in `run.notes`."""
    with _open(needed("duckdb", "millrace query"), run, TABLES) as connection:
        found = []
        for name in TABLES:
            columns = dict(row[:2] for row in connection.execute(f"describe {name}").fetchall())
            (count,) = connection.execute(f"select count(*) from {name}").fetchone()
            found.append(Table(name, columns, count))
        return found


def _open(duckdb: Any, run: RunReader, names: Iterable[str]) -> Any:
    """Return a database with these tables, which may read nothing else."""
    connection = duckdb.connect(":memory:")
    for name in names:
        connection.register(name, TABLES[name](run))
    for setting in (
        "temp_directory=''",
        "enable_external_access=false",
        "python_enable_replacements=false",
        "autoinstall_known_extensions=false",
        "autoload_known_extensions=false",
        "lock_configuration=true",
    ):
        connection.execute(f"set {setting}")
    return connection


# -- the tables


def _by_version(run: RunReader, rows: dict[int, dict[str, float]]) -> pa.Table:
    """Return one row for each version. A figure that a row lacks is null."""
    import pyarrow as pa

    if error := run.unreadable(METRICS):
        raise error
    names = [n for n in run.names if n.startswith("val/") == (rows is run.validations)]
    schema = pa.schema([("version", pa.int64()), *((name, pa.float64()) for name in names)])
    lines = [{"version": version} | row for version, row in sorted(rows.items())]
    return pa.Table.from_pylist(lines, schema)


def _samples(run: RunReader) -> Any:
    from millrace.report.samples.store import dataset

    return dataset(run.path, run.notes)


def _spans(run: RunReader) -> pa.Table:
    import pyarrow as pa

    from millrace.report.trace import spans

    found = spans.read(run.path)
    if any(s.name == "thinned" for s in found):
        run.notes.append("This run was fast: spans has some samples only. See docs/trace.md")
    encode = msgspec.json.Encoder().encode
    columns = {
        **({"attempt": "int32"} | dict.fromkeys(("track", "name", "key"), "string")),
        "start_s": "float64",
        "end_s": "float64",
        "facts": "string",
    }
    values = [[getattr(s, name.removesuffix("_s")) for s in found] for name in [*columns][:-1]]
    values.append([encode(s.facts).decode() for s in found])
    return pa.table(values, schema=pa.schema(columns))


def _accounts(run: RunReader) -> pa.Table:
    """Return one row for each amount of each line of the accounts."""
    import pyarrow as pa

    if error := run.unreadable(accounts.FILE):
        raise error
    rows = [
        {"attempt": line.attempt, "event": line.event, "version": line.version}
        | {"seconds": line.seconds, "kind": kind, "device": device, "name": name}
        | {"amount": float(amount)}
        for line in run.accounts
        for kind, device, name, amount in _amounts(line)
    ]
    columns = {
        **dict.fromkeys(("attempt", "version"), "int64"),
        **dict.fromkeys(("event", "kind", "device", "name"), "string"),
        **dict.fromkeys(("seconds", "amount"), "float64"),
    }
    return pa.Table.from_pylist(rows, pa.schema(columns))


def _amounts(line: accounts.Line) -> Iterator[tuple[str, str | None, str, float]]:
    """Yield kind, device, name and amount, such as `tokens`, None, `trained`, 1024."""
    for name in ("generated", "prefill", "retired", "price"):
        yield "total", None, name, getattr(line, name)
    for kind in ("tokens", "slots", "samples", "requests", "scores"):
        for name, amount in msgspec.to_builtins(getattr(line, kind)).items():
            yield kind, None, name, amount
    for track, device in line.devices.items():
        yield "devices", track, "count", device.count
        for name, amount in device.seconds.items():
            yield "device_seconds", track, name, amount


def _history(run: RunReader) -> pa.Table:
    """Return the lines of the history. `survives` says whether a later attempt replaced them."""
    import pyarrow as pa

    try:
        lines = history.read(run.path)
    except CheckpointError as error:
        raise bad_value("RUN", str(run.path), str(error), "the folder of a run") from None
    kept = set(map(id, history.surviving(lines)))
    ids = pa.list_(pa.int64())
    columns = {
        **dict.fromkeys(("attempt", "version", "admitted", "retired"), "int64"),
        "event": "string",
        "dropped": pa.map_(pa.string(), pa.int64()),
        "trained": ids,
        "slots": ids,
        "complete": "bool",
        "survives": "bool",
    }
    rows = [
        {name: getattr(line, name) for name in columns if name != "survives"}
        | {"dropped": list(line.dropped.items()), "survives": id(line) in kept}
        for line in lines
    ]
    return pa.Table.from_pylist(rows, pa.schema(columns))


TABLES: dict[str, Callable[[RunReader], Any]] = {
    "metrics": lambda run: _by_version(run, run.rows),
    "validations": lambda run: _by_version(run, run.validations),
    "samples": _samples,
    "spans": _spans,
    "accounts": _accounts,
    "history": _history,
}
"""The reader of each table."""
