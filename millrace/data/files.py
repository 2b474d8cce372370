"""Readers of data files.

Each returns the number of rows, a function from an index to a row, and the rows' line numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from millrace.errors import bad_row

Read = tuple[int, Callable[[int], dict[str, Any]], Sequence[int]]


def read_parquet(path: Path) -> Read:
    """Read a parquet file. Raise DataError for any other file."""
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise bad_row(
            path.name, str(error).splitlines()[0], "is not readable as parquet", "write it again"
        ) from None
    return table.num_rows, lambda i: table.slice(i, 1).to_pylist()[0], ()


def read_jsonl(path: Path) -> Read:
    """Read one object per line. Blank lines are skipped, but count in row numbers.

    Raise DataError with the row's number.
    """
    rows, numbers = [], []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                rows.append(_object(f"{path.name} row {number}", line))
                numbers.append(number)
    return len(rows), rows.__getitem__, numbers


def read_json(path: Path) -> Read:
    """Read a list of objects, an object with a list under "data", or one object per line.

    Raise DataError for any other content.
    """
    head = path.read_bytes()
    if not head.strip():
        return 0, [].__getitem__, ()
    try:
        whole = json.loads(head)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Extra data"):
            return read_jsonl(path)
        raise bad_row(
            path.name, f"line {error.lineno}", f"is not JSON: {error.msg}", "correct it"
        ) from None
    except UnicodeDecodeError as error:
        raise bad_row(
            path.name, f"byte {error.start}", "is not UTF-8", "save it as UTF-8"
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # JSON, but with a number or a nesting that Python does not read
        raise bad_row(
            path.name,
            path.name,
            f"cannot be read: {str(error).partition(';')[0]}",
            "shorter numbers, fewer levels",
        ) from None
    if isinstance(whole, dict):
        whole = whole["data"] if isinstance(whole.get("data"), list) else [whole]
    if not isinstance(whole, list):
        raise bad_row(
            path.name, whole, "must be a list of objects", 'the form [{"prompt": ...}, ...]'
        )
    for number, row in enumerate(whole, 1):
        if not isinstance(row, dict):
            raise bad_row(
                f"{path.name} row {number}", row, "must be an object", 'the form {"prompt": ...}'
            )
    return len(whole), whole.__getitem__, ()


def _object(where: str, line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad_row(
            where, line[:60], f"is not UTF-8 at byte {error.start}", "save the file as UTF-8"
        ) from None
    try:
        row = json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        rule = f"is not JSON: {error.msg} at column {error.colno}"
        raise bad_row(where, text.strip(), rule, "one JSON object on each line") from None
    except (ValueError, RecursionError) as error:
        raise bad_row(
            where,
            text[:60],
            f"cannot be read: {str(error).partition(';')[0]}",
            "shorter numbers, fewer levels",
        ) from None
    if not isinstance(row, dict):
        raise bad_row(where, row, "must be an object", 'the form {"prompt": ...}')
    return row


READERS: dict[str, Callable[[Path], Read]] = {
    ".parquet": read_parquet,
    ".jsonl": read_jsonl,
    ".json": read_json,
}
