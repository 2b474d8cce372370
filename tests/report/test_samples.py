"""The samples that a run keeps: which ones, their columns, and what becomes of them at a resume."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.report.page.samples import choose, read_table, read_texts
from millrace.report.samples import store as samples
from millrace.report.samples.store import SCHEMA, SampleStore, keeps, rows_of
from millrace.types import (
    WINDOW,
    Author,
    Continuation,
    Score,
    Segment,
    Thread,
    Tokens,
    Trajectory,
    floats_of,
    tokens_of,
)
from tests.report.runs import Clock, Run, Watch, decode, life, sample, segment


def kept(folder: Path) -> list[tuple[int, int, int, str]]:
    """Return version, sample, trajectory and outcome of every row."""
    rows = samples.dataset(folder).to_table().to_pylist()
    return [(r["version"], r["sample"], r["trajectory"], r["outcome"]) for r in rows]


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "samples").iterdir())


def test_a_row_has_what_the_trajectory_had(tmp_path: Path) -> None:
    Run(tmp_path, ["samples"]).go([1])
    assert names(tmp_path) == ["version-000001-attempt-001.parquet"]
    table = samples.dataset(tmp_path).to_table()
    assert table.schema.equals(SCHEMA) and table.num_rows == 4
    common = {
        "version": 1,
        "sample": 0,
        "outcome": "trained",
        "data_source": "task:sums",
        "prompt": "2 + 2 =",
        "ground_truth": "4",
        "prompt_tokens": 3,
        "admitted_version": 0,
        "first": 0,
        "windows_before": 0,
    }
    first, second = table.to_pylist()[:2]
    assert first == common | {
        "trajectory": 0,
        "response": "AB",
        "reward": 1.0,
        "raw": 0.25,
        "components": [("format", 0.5)],
        "answer": "4",
        "tokens": 2,
        "stop": "eos",
        "ended": "done",
        "threads": 1,
        "messages": None,
        "segments": [{"version": 0, "author": "policy", "tokens": 2, "text": "AB"}],
    }
    assert second == common | {
        "trajectory": 1,
        "response": "CDEFG",
        "reward": -1.0,
        "raw": -1.0,
        "components": [],
        "answer": None,
        "tokens": 5,
        "stop": "length",
        "ended": "done",
        "threads": 1,
        "messages": None,
        "segments": [
            {"version": 0, "author": "policy", "tokens": 1, "text": "C"},
            {"version": 1, "author": "policy", "tokens": 2, "text": "DE"},
            {"version": -1, "author": "environment", "tokens": 1, "text": "F"},
            {"version": 1, "author": "policy", "tokens": 1, "text": "G"},
        ],
    }


def test_a_sample_is_kept_with_the_version_that_went_live_with_it(tmp_path: Path) -> None:
    """Steps of the next version may end before this one is live. Trained alone is not enough."""
    store = SampleStore(tmp_path, 1, 0, decode, print)
    watch = Watch(Clock(), [store])
    for ids in ([0], [1], [2]):
        watch.at("trainer", "stepped", samples=[sample(i) for i in ids], version=0, report=None)
    watch.at("run", "published", version=1, ids=[0], totals=None)
    watch.at("run", "published", version=2, ids=[1], totals=None)
    store.close()
    assert {row[:2] for row in kept(tmp_path)} == {(1, 0), (2, 1)}


def test_dropped_samples_are_kept_with_the_live_version(tmp_path: Path) -> None:
    store = SampleStore(tmp_path, 1, 4, decode, print)
    watch, clock = Watch(Clock(), [store]), Clock()
    watch.at("samples", "equal_outcomes", "7", sample=sample(7))
    watch.at("samples", "dropped", "7", reason="equal_outcomes")
    life(watch, clock, 5, [8])
    watch.at("samples", "equal_outcomes", "9", sample=sample(9))
    life(watch, clock, 6, [10])
    store.close()
    outcomes = {(v, s, o) for v, s, _, o in kept(tmp_path)}
    assert outcomes == {
        (4, 7, "dropped/equal_outcomes"),
        (5, 8, "trained"),
        (5, 9, "dropped/equal_outcomes"),
        (6, 10, "trained"),
    }


def test_a_run_that_drops_everything_shows_what_it_dropped(tmp_path: Path) -> None:
    for attempt in (1, 2):
        store = SampleStore(tmp_path, attempt, 3, decode, print)
        watch = Watch(Clock(), [store])
        watch.at("samples", "equal_outcomes", "7", sample=sample(attempt))
        store.close()
        assert {row[:2] for row in kept(tmp_path)} == {(3, attempt)}


def test_a_resumed_run_supersedes_the_versions_that_it_makes_again(tmp_path: Path) -> None:
    run = Run(tmp_path, ["samples"])
    run.go([1, 2, 3])
    run.go([3, 4])
    run.go([2])
    assert names(tmp_path) == [
        "superseded-1-version-000002-attempt-001.parquet",
        "superseded-1-version-000003-attempt-001.parquet",
        "superseded-1-version-000003-attempt-002.parquet",
        "superseded-1-version-000004-attempt-002.parquet",
        "version-000001-attempt-001.parquet",
        "version-000002-attempt-003.parquet",
    ]
    assert {row[0] for row in kept(tmp_path)} == {1, 2} and not run.notes


def test_a_run_that_keeps_nothing_supersedes_too(tmp_path: Path) -> None:
    run = Run(tmp_path, ["samples"])
    run.go([1, 2])
    run.go([2], samples={"share": 0})
    assert {row[0] for row in kept(tmp_path)} == {1}
    other = Run(tmp_path / "other", ["samples"])
    other.folder.mkdir()
    other.go([1], samples={"share": 0.0})
    assert not list(other.folder.iterdir()) and not other.notes


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_keeps_the_same_samples_and_more(one: float, other: float) -> None:
    small, large = sorted((one, other))
    few, many = ({i for i in range(300) if keeps(i, share)} for share in (small, large))
    assert few <= many and len(many) == pytest.approx(300 * large, abs=60)


def test_all_trajectories_of_a_sample_are_kept_or_none(tmp_path: Path) -> None:
    Run(tmp_path, ["samples"]).go(range(1, 30), samples={"share": 0.5})
    rows = kept(tmp_path)
    found = {s for _, s, _, _ in rows}
    assert found == {i for i in range(58) if keeps(i, 0.5)} and 0 < len(found) < 58
    assert len(rows) == 2 * len(found)


def test_the_folder_never_exceeds_its_limit(tmp_path: Path) -> None:
    text = os.urandom(100_000).hex()
    store_notes: list[str] = []

    def decode_noise(tokens: Tokens) -> str:
        return text[sum(tokens) :]

    for attempt in (1, 2):
        store = SampleStore(
            *(tmp_path, attempt, 0, decode_noise, store_notes.append), max_mb=2, close_s=60
        )
        for version in range(1, 16):
            life(Watch(Clock(), [store]), Clock(), version, [version])
        store.close()
        assert len(store_notes) == attempt and "report.samples_mb" in store_notes[-1]
    sizes = [p.stat().st_size for p in (tmp_path / "samples").iterdir()]
    assert 1e6 < sum(sizes) <= 2 * 2**20
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    """The decoder fails in the middle of the second file."""
    calls: list[int] = []

    def decode_twice(tokens: Sequence[int]) -> str:
        calls.append(1)
        if len(calls) > 15:
            raise RuntimeError("Already borrowed")
        return decode(tokens)

    notes: list[str] = []
    store = SampleStore(tmp_path, 1, 0, decode_twice, notes.append)
    for version in (1, 2, 3):
        life(Watch(Clock(), [store]), Clock(), version, [2 * version, 2 * version + 1])
    store.close()
    assert names(tmp_path) == ["version-000001-attempt-001.parquet"]
    (note,) = notes
    assert "Already borrowed" in note and "continues" in note


def test_a_slow_disk_costs_samples_and_neither_memory_nor_time(tmp_path: Path) -> None:
    go = threading.Event()

    def slow(tokens: Sequence[int]) -> str:
        go.wait()
        return decode(tokens)

    notes: list[str] = []
    store = SampleStore(tmp_path, 1, 0, slow, notes.append, waiting_mb=1, close_s=60)
    watch, clock = Watch(Clock(), [store]), Clock()
    for version in range(1, 401):
        life(watch, clock, version, [2 * version, 2 * version + 1])
        watch.at("samples", "equal_outcomes", "7", sample=sample(10_000 + version))
    assert store.lost > 100 and len(notes) == 1 and "too slow" in notes[0]
    assert store._waiting <= 2**20
    go.set()
    store.close()
    assert 0 < len(names(tmp_path)) < 400


def test_the_end_waits_for_a_limited_time(tmp_path: Path) -> None:
    go = threading.Event()

    def stuck(tokens: Sequence[int]) -> str:
        go.wait()
        return ""

    notes: list[str] = []
    store = SampleStore(tmp_path, 1, 0, stuck, notes.append, close_s=0.05)
    life(Watch(Clock(), [store]), Clock(), 1, [1])
    store.close()
    go.set()
    assert len(notes) == 1 and "not kept in time" in notes[0]


def test_a_linked_folder_and_foreign_files_are_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "version-000009-attempt-001.parquet").write_text("mine")
    (tmp_path / "samples").symlink_to(elsewhere)
    run = Run(tmp_path, ["samples"])
    run.go([1])
    assert [p.name for p in elsewhere.iterdir()] == ["version-000009-attempt-001.parquet"]
    folder = tmp_path / "samples"
    (folder / "notes.parquet").write_text("mine")
    (folder / "version-000001-attempt-002.parquet").write_text("mine")
    run.go([2])
    assert not run.notes and {row[0] for row in kept(tmp_path)} == {1, 2}
    assert (folder / "notes.parquet").read_text() == "mine"
    assert (folder / "version-000001-attempt-002.parquet").read_text() == "mine"


def test_a_file_in_the_place_of_the_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("mine")
    run = Run(tmp_path, ["samples"])
    run.go([1])
    (note,) = run.notes
    assert "cannot be written" in note and (tmp_path / "samples").read_text() == "mine"


def test_texts_of_any_kind_are_kept(tmp_path: Path) -> None:
    store = SampleStore(tmp_path, 1, 0, lambda tokens: "\ud800\0é", print)
    odd = sample(1, text="\udfff", truth={"a": [1, object], "b": 2**90})
    watch = Watch(Clock(), [store])
    watch.at("trainer", "stepped", samples=[odd], version=0, report=None)
    watch.at("run", "published", version=1, ids=[1], totals=None)
    store.close()
    row = samples.dataset(tmp_path).to_table().to_pylist()[0]
    assert row["response"] == "\\ud800\0é" and row["prompt"] == "\\udfff"
    assert row["ground_truth"].startswith('{"a": [1, "<class') and str(2**90) in row["ground_truth"]


def test_the_files_of_a_run_are_compressed(tmp_path: Path) -> None:
    assert samples.dataset(tmp_path).to_table(columns=["reward"]).num_rows == 0
    Run(tmp_path, ["samples"]).go([1])
    path = samples.files(tmp_path, [])[0]
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


def test_the_threads_and_the_conversation_of_an_episode_are_in_its_row() -> None:
    say = lambda text: segment(0, [ord(c) for c in text])  # noqa: E731
    heard = Segment(tokens_of([70]), Author.ENVIRONMENT)
    messages = ({"role": "user", "content": "é"}, {"role": "assistant", "content": "B"})
    one = Trajectory(
        (Thread((say("A"),)), Thread((heard, say("B")), tokens_of([88]))),
        Score(1.0),
        "turns",
        messages,
    )
    (row,) = rows_of(replace(sample(0), trajectories=(one,)), 1, "trained", decode)
    assert (row["ended"], row["threads"], row["stop"]) == ("turns", 2, "length")
    assert json.loads(row["messages"]) == list(messages) and row["response"] == "AFB"
    shown = [(s["author"], s["text"]) for s in row["segments"]]
    assert shown == [("policy", "A"), ("opening", "X"), ("environment", "F"), ("policy", "B")]


def test_a_row_of_a_window_names_the_response_and_the_windows_before_it(tmp_path: Path) -> None:
    before = Continuation(4, 2, 3, floats_of([0.0] * 6))
    one = sample(9)
    prompt = replace(one.prompt, tokens=tokens_of([1] * 9), continues=before)
    goes_on = replace(one.trajectories[0], score=None, ended=WINDOW)
    part = replace(one, prompt=prompt, trajectories=(goes_on,))
    (row,) = rows_of(part, 5, "trained", decode)
    assert (row["sample"], row["first"], row["windows_before"], row["prompt_tokens"]) == (
        9,
        4,
        2,
        9,
    )
    assert (row["ended"], row["reward"]) == ("window", None)
    (tmp_path / "samples").mkdir()
    last = replace(part, trajectories=one.trajectories[:1])
    last = replace(last, prompt=replace(prompt, index=10))
    kept = [(part, 5, "trained"), (last, 5, "trained")]
    samples.write(samples.path_of(tmp_path, 5, 1), kept, decode)
    table = read_table(tmp_path)
    shown = [s["responses"][0] for s in read_texts(table, choose(table)).values()]
    of = "window 3 of the response that sample 4 began"
    assert sorted(s["ended"] for s in shown) == [f"{of}, eos", f"{of}, goes on"]
    assert {s["reward"] for s in shown} == {None, 1.0}


def test_a_file_from_before_windows_is_read(tmp_path: Path) -> None:
    Run(tmp_path, ["samples"]).go([1, 2])
    notes: list[str] = []
    old = samples.files(tmp_path, notes)[0]
    pq.write_table(
        pq.read_table(old, partitioning=None).drop_columns(["first", "windows_before"]), old
    )
    assert old in samples.files(tmp_path, notes) and not notes
    found = samples.dataset(tmp_path).to_table(columns=["version", "windows_before"]).to_pylist()
    assert {row["windows_before"] for row in found if row["version"] == 1} == {None}
    assert {row["windows_before"] for row in found if row["version"] == 2} == {0}
    assert read_table(tmp_path).notes == []


def test_a_file_without_newer_columns_is_left_out_and_named(tmp_path: Path) -> None:
    Run(tmp_path, ["samples"]).go([1, 2])
    old = samples.files(tmp_path, [])[0]
    pq.write_table(pq.read_table(old, partitioning=None).drop_columns(["threads", "messages"]), old)
    notes: list[str] = []
    assert old not in samples.files(tmp_path, notes)
    (note,) = notes
    assert "1 of 2 files" in note and f"{old.name} has no threads, messages" in note
    assert notes == read_table(tmp_path).notes
