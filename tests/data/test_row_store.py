"""Rows of files in Arrow: each distinct row once, and whole or not at all in the cache."""

from __future__ import annotations

import datetime
import decimal
import errno
import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest
from pyarrow import parquet

from millrace.data import row_store
from millrace.data.row_store import RowCache
from millrace.data.sources import Rows, load_sources
from millrace.errors import DataError
from tests.waiting import HANG_S, until

ROWS = [{"prompt": f"{i % 40} + 1?", "answer": str(i % 40 + 1)} for i in range(100)]


@pytest.fixture(autouse=True)
def every_file_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "_ON_DISK", 0)
    monkeypatch.setattr(row_store, "_BATCH", 7)


def written(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Loads:
    """Loads files with a cache, and counts how often a file is read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.notes, self.built = folder / "cache", list[str](), 0
        build: Callable[..., Any] = row_store._build

        def counted(*arguments: Any) -> Any:
            self.built += 1
            return build(*arguments)

        monkeypatch.setattr(row_store, "_build", counted)

    def __call__(self, *paths: Path) -> Rows:
        cache = RowCache(self.folder, self.notes.append)
        return load_sources([str(path) for path in paths], seed=0, cache=cache)

    @property
    def places(self) -> list[Path]:
        return sorted(self.folder.iterdir())


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(tmp_path, monkeypatch)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_second_start_reads_no_file_again(tmp_path: Path, load: Loads, suffix: str) -> None:
    path = written(tmp_path / f"t{suffix}")
    first = load(path)
    assert list(first) == ROWS and load.built == 1
    assert list(load(path)) == ROWS and load.built == 1
    (tmp_path / "moved").mkdir()
    assert list(load(path.rename(tmp_path / "moved" / path.name))) == ROWS and load.built == 1
    assert list(first.distinct(1)) == list(range(40)) and first.repeated == 60
    assert load.notes == []


def test_rows_have_the_same_digests_in_every_format_and_other_rows_have_others(
    tmp_path: Path, load: Loads
) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "ü"}], "extra_info": {"a": None, "b": i}}
        for i in range(9)
    ]
    given = [load(written(tmp_path / f"t{s}", rows)) for s in (".jsonl", ".json", ".parquet")]
    (tmp_path / "u.jsonl").write_text(
        "\n\n".join(json.dumps(dict(reversed(row.items())), ensure_ascii=False) for row in rows)
    )
    given.append(load(tmp_path / "u.jsonl"))
    digests = [part.stored.digests.tolist() for r in given for part in r.parts if part.stored]
    assert digests[0] == digests[1] == digests[2] == digests[3] and len(set(digests[0])) == 9
    assert given[3].describe(4) == "u.jsonl row 9"


def test_a_file_that_changes_is_read_again(tmp_path: Path, load: Loads) -> None:
    path = written(tmp_path / "t.jsonl")
    load(path)
    rows = [*ROWS[:-1], {"prompt": "9 + 9?", "answer": "18"}]
    assert list(load(written(path, rows))) == rows and load.built == 2


def test_an_edit_of_the_file_does_not_reach_a_run(tmp_path: Path, load: Loads) -> None:
    path = written(tmp_path / "t.jsonl")
    rows = load(path)
    path.write_text("")
    assert list(rows) == ROWS


@pytest.mark.parametrize("name", ["rows.arrow", "index.arrow", "manifest.json"])
@pytest.mark.parametrize("fault", ["cut", "missing", "changed"])
def test_a_damaged_copy_is_made_again_with_a_note(
    tmp_path: Path, load: Loads, name: str, fault: str
) -> None:
    path = written(tmp_path / "t.jsonl")
    load(path)
    file = load.places[0] / name
    data = file.read_bytes()
    if fault == "missing":
        file.unlink()
    else:
        middle = data.find(b"3 + 1?") if name == "rows.arrow" else len(data) // 2
        changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        file.write_bytes(data[:-5] if fault == "cut" else changed)
    if name == "rows.arrow" and fault == "changed":  # rows are looked at when they are used
        with pytest.raises(DataError, match=r"damaged.*Fix: the same command again"):
            list(load(path))
        assert list(load(path)) == ROWS and load.notes == []
        return
    assert list(load(path)) == ROWS and load.built == 2
    assert len(load.notes) == 1 and load.notes[0].endswith("made again")


def test_a_killed_write_leaves_nothing_that_counts(tmp_path: Path, load: Loads) -> None:
    path = written(tmp_path / "t.jsonl")
    half = load.folder / ".writing-killed"
    half.mkdir(parents=True)
    (half / "rows.arrow").write_bytes(b"half")
    assert list(load(path)) == ROWS and list(load(path)) == ROWS and load.built == 1


def test_the_half_copy_of_an_ended_process_goes_and_that_of_a_live_one_stays(
    tmp_path: Path, load: Loads
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone, live = (load.folder / f"{row_store._OWN}{pid}-x" for pid in (ended.pid, os.getppid()))
    for half in (gone, live):
        half.mkdir(parents=True)
    assert list(load(written(tmp_path / "t.jsonl"))) == ROWS
    assert live.is_dir() and not gone.exists()


def test_ctrl_c_while_rows_are_read_leaves_no_half_copy(tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", tmp_path / "large.jsonl"
    with path.open("w") as file:
        for i in range(400_000):
            file.write(f'{{"prompt": "What is {i} + 1?", "answer": "{i + 1}"}}\n')
    keys = [f"data.train_files=[{path}]", f"data.val_files=[{path}]", "reward.function=exact"]
    command = [sys.executable, "-m", "millrace", "train", "quickstart", *keys]
    run = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"MILLRACE_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    until(lambda: any(cache.rglob(f"{row_store._WRITING}*")), process=run)
    run.send_signal(signal.SIGINT)
    printed = run.communicate(timeout=HANG_S)[0].decode()
    assert run.returncode == 130, printed
    assert not list(cache.rglob(f"{row_store._WRITING}*"))


def test_a_full_disk_keeps_the_rows_in_memory_and_says_so(
    tmp_path: Path, load: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(row_store, "_write_index", full)
    assert list(load(written(tmp_path / "t.jsonl"))) == ROWS
    assert len(load.notes) == 1 and "No space left" in load.notes[0] and "memory" in load.notes[0]
    assert load.places == []


def test_a_bad_line_is_named_and_leaves_no_copy(tmp_path: Path, load: Loads) -> None:
    path = written(tmp_path / "t.jsonl")
    path.write_text(path.read_text() + "\n{oops\n")
    with pytest.raises(DataError, match=r"^t\.jsonl row 102: .*is not JSON"):
        load(path)
    assert load.places == []


def test_two_starts_at_once_share_one_copy(tmp_path: Path, load: Loads) -> None:
    path = written(tmp_path / "t.jsonl")
    found: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: found.append(list(load(path)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [ROWS] * 4 and len(load.places) == 1 and load.notes == []


def test_the_cache_keeps_the_files_that_were_used_last(
    tmp_path: Path, load: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_store, "_KEPT", 2)
    for n in range(4):
        load(written(tmp_path / "t.jsonl", ROWS[n:]))
    assert len(load.places) == 2


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a", "x": NaN}',
        '{"prompt": "a", "x": 1e999}',
        '{"prompt": "a", "x": "\\ud800"}',
        '{"prompt": "a", "x": 123456789012345678901234567890}',
        '\ufeff{"prompt": "a", "x": 1}',
    ],
)
def test_a_row_is_the_one_that_python_reads(tmp_path: Path, load: Loads, line: str) -> None:
    (tmp_path / "t.jsonl").write_text(line)
    assert repr(load(tmp_path / "t.jsonl")[0]) == repr(json.loads(line.lstrip("\ufeff")))


def test_values_that_json_lacks_keep_the_digest_of_their_line(tmp_path: Path, load: Loads) -> None:
    """A row from the cache is checked by its digest. The second row has no null."""
    day = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC)
    values = {
        "time": [None, day],
        "date": [day.date(), day.date()],
        "long": [datetime.timedelta(seconds=3), datetime.timedelta(0)],
        "exact": [decimal.Decimal("1.50"), decimal.Decimal("-2.25")],
        "float": [math.nan, 1e22],
        "small": numpy.array([0.1, -0.0], "f4"),
        "infinite": [math.inf, 0.1],
        "bytes": [b"\xff\x00", b"null"],
        "text": ["null", "ü\u2028😀\x00"],
        "big": numpy.array([0, 2**64 - 1], "u8"),
        "map": pyarrow.array(
            [[("b", 1), ("a", None)], [("b", 2), ("a", 1)]], pyarrow.map_("string", "int64")
        ),
        "nested": [[{"b": None, "a": [1.0]}], [{"b": 1, "a": []}]],
        "kind": pyarrow.array(["x", "y"]).dictionary_encode(),
    }
    parquet.write_table(pyarrow.table(values), tmp_path / "t.parquet")
    rows = load(tmp_path / "t.parquet")
    stored = rows.parts[0].stored
    assert stored is not None and stored.folder is not None
    assert [len(row) for row in rows] == [len(values)] * 2
    made = [row_store.digest(row)[:8] for row in rows]
    assert made == [digest.tobytes() for digest in stored.digests]


@pytest.mark.parametrize("on", [True, False])
def test_a_read_leaves_pythons_collector_as_it_was(tmp_path: Path, load: Loads, on: bool) -> None:
    path, before = written(tmp_path / "t.jsonl"), gc.isenabled()
    try:
        gc.enable() if on else gc.disable()
        load(path)
        assert gc.isenabled() is on
        (tmp_path / "bad.jsonl").write_text('{"prompt": \n')
        with pytest.raises(DataError):
            load(tmp_path / "bad.jsonl")
        assert gc.isenabled() is on
    finally:
        gc.enable() if before else gc.disable()


def test_rows_with_numbers_of_numpy_are_those_of_python(load: Loads) -> None:
    given: list[dict[str, Any]] = [
        {"n": numpy.int64(5), "a": numpy.array([1.5])},
        {"n": 5, "a": [1.5]},
    ]
    stored = RowCache(load.folder).of_rows("key", lambda: enumerate(given, 1), "hub")
    assert stored.digests[0] == stored.digests[1] and stored.index.tolist() == [0, 0]
    assert stored.get(0) == {"n": 5, "a": [1.5]}
