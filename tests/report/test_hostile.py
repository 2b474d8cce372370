"""A run folder from somebody else: nothing hangs, crashes, fills the memory or leads out of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import MillraceError
from millrace.persist.run_reader import RunReader, load
from millrace.report import query
from millrace.report.advice import advise
from millrace.report.live.look import look_at
from millrace.report.page.write import of_run, write_report
from tests.report.run_folders import write_run

READERS: dict[str, Callable[[Path], object]] = {
    "report": lambda folder: write_report([folder]),
    "watch": lambda folder: look_at(RunReader(folder)),
    "advice": lambda folder: advise(RunReader(folder).read()),
    "query": lambda folder: query.tables(RunReader(folder).read()),
}
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
)
CONFIGS = {
    "bomb": BOMB,
    "circle": "a: &a\n  b: *a\n",
    "circle of lists": "a: &a [*a]\n",
    "key that is a date": "x: [{2020-01-01: 1}]\n",
    "no date": "x: 2020-99-99\n",
    "no number": "x: !!int zz\n",
    "long number": "x: " + "9" * 5000,
    "deep list": "[" * 600,  # deep enough for a RecursionError
    "deep map": "{a: " * 3000 + "1" + "}" * 3000,
    "large": "x: " + "a" * (1 << 23),
}
LINES = {
    "staleness/token_hist": {"version": 3, "staleness/token_hist/\u00b2": 1.0},
    "long digits": {"version": 3, "staleness/token_hist/" + "9" * 5000: 1.0},
    "a text": {"version": 3, "perf/time_per_version": "x", "train/samples": [1]},
    "half a character": {"version": 3, "reward/\ud800/mean": 1.0},
    "large number": {"version": 10**400, "reward/mean": 10**400},
    "large version": {"version": 10**30, "event": "version", "attempt": 10**30, "time": 1},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("hostile") / "run", samples=24, killed_at=8.0)


def copied(whole: Path, folder: Path) -> Path:
    return Path(shutil.copytree(whole, folder))


def read_all(folder: Path) -> None:
    """Read a folder in every way. A refusal that says why is an answer."""
    for read in READERS.values():
        try:
            read(folder)
        except MillraceError:
            continue


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bad_configuration_is_named(whole: Path, tmp_path: Path, name: str) -> None:
    folder = copied(whole, tmp_path / "run")
    (folder / "config.yaml").write_text(CONFIGS[name])
    read_all(folder)
    assert "Not readable: config.yaml: " in json.dumps(of_run(load(folder))[0])


def test_a_pipe_is_not_read(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "run")
    for name in ("config.yaml", "accounts.jsonl"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    read_all(folder)


def test_a_report_does_not_show_a_file_outside_of_the_folder(whole: Path, tmp_path: Path) -> None:
    folder, secret = copied(whole, tmp_path / "run"), tmp_path / "secret.yaml"
    secret.write_text("key: SECRET\n")
    (folder / "config.yaml").unlink()
    (folder / "config.yaml").symlink_to(secret)
    assert "SECRET" not in json.dumps(of_run(load(folder))[0])


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("file", ["metrics.jsonl", "history.jsonl", "accounts.jsonl"])
def test_lines_that_no_run_writes_do_no_harm(
    whole: Path, tmp_path: Path, file: str, name: str
) -> None:
    folder = copied(whole, tmp_path / "run")
    with (folder / file).open("ab") as out:
        out.write(json.dumps(LINES[name]).encode() + b'\n{"version": 1, "\xed\xa0\x80": 1}\n')
    read_all(folder)


@pytest.mark.parametrize("name", ["metrics.jsonl", "history.jsonl", "accounts.jsonl", "trace"])
def test_a_line_without_end_does_not_fill_the_memory(
    whole: Path, tmp_path: Path, name: str
) -> None:
    folder = copied(whole, tmp_path / "run")
    path = next((folder / "trace").iterdir()) if name == "trace" else folder / name
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    read_all(folder)


SLICE: dict[str, Any] = {"pid": 9999, "tid": 9999, "ph": "X", "ts": 1, "dur": 2}
SLICE |= {"cat": "request", "name": "request 1/0"}
SLICES = {
    "huge tokens": SLICE | {"args": {"tokens": 10**400, "stop": "eos"}},
    "large tokens": SLICE | {"args": {"tokens": 2**70, "stop": "eos"}},
    "for ever": SLICE | {"ts": 1e308, "dur": 1e308, "cat": "idle"},
    "late": SLICE | {"ts": 1e300, "cat": "generate"},
    "early": SLICE | {"ts": -1e300, "cat": "generate"},
    "backwards": SLICE | {"ts": 1e6, "dur": -1e7, "cat": "left"},
    "half a character": SLICE | {"cat": "generate\ud800", "name": "x\ud800"},
    "thinned": SLICE | {"cat": "thinned", "args": {"every": 10**30}},
    "relabelled": SLICE
    | {"cat": "", "name": "relabelled", "args": {"seconds": 10**400, "source": [1]}},
}


@pytest.mark.parametrize("track", ["rollout-0", "rollouts", "trainer"])
@pytest.mark.parametrize("name", SLICES)
def test_a_bad_slice_of_a_trace_does_no_harm(
    whole: Path, tmp_path: Path, name: str, track: str
) -> None:
    folder = copied(whole, tmp_path / "run")
    path = next((folder / "trace").iterdir())
    process = {"ph": "M", "pid": 9999, "tid": 0, "ts": 0, "name": "process_name"}
    lines = (process | {"args": {"name": track}}, SLICES[name])
    whole_text = path.read_text().rstrip().removesuffix("]")
    path.write_text(",\n".join([whole_text, *map(json.dumps, lines)]) + "\n]\n")
    read_all(folder)
    query.query(RunReader(folder).read(), "select * from spans")
