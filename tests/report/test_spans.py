"""The spans that a reader finds in a trace, also in a damaged one."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from millrace.report.trace import spans
from millrace.report.trace.spans import Span
from millrace.report.trace.writer import TraceWriter
from millrace.waits.stream import Event
from tests.pipeline.simulated import RUNS, schedule_of, simulate
from tests.report.runs import Run, Watch
from tests.report.test_trace import check, files, lines


def named(found: list[Span], track: str, name: str) -> list[Span]:
    return [s for s in found if s.track == track and s.name == name]


class Reference:
    """A watcher that pairs begins and ends itself."""

    def __init__(self) -> None:
        self.spans: Counter[tuple[Any, ...]] = Counter()
        self._begun: dict[tuple[str, str, str], list[float]] = {}
        self._states: dict[tuple[str, str], tuple[str, float]] = {}

    def __call__(self, event: Event) -> None:
        track, name, key = event.track, event.name, event.key
        if event.phase == "begin":
            self._begun.setdefault((track, name, key), []).append(event.time)
        elif event.phase == "end":
            self._add(track, name, key, self._begun[track, name, key].pop(0), event.time)
        elif event.phase == "state" or (track == "samples" and name != "equal_outcomes"):
            last = self._states.pop((track, key), None)
            if last is not None:
                self._add(track, last[0], key, last[1], event.time)
            if name not in ("retired", "dropped"):
                self._states[track, key] = name, event.time

    def _add(self, track: str, name: str, key: str, begin: float, end: float) -> None:
        self.spans[track, name, key, round(begin * 1e6), round(end * 1e6)] += 1


@pytest.mark.parametrize("mode", RUNS)
def test_the_spans_of_a_simulated_run_are_its_events(mode: str, tmp_path: Path) -> None:
    reference, writers, notes = Reference(), list[TraceWriter](), list[str]()

    def watchers(now: float, ledger: object) -> list[Any]:
        clock = asyncio.get_running_loop().time
        writers.append(TraceWriter(tmp_path, 1, clock, notes.append))
        return [reference, *writers]

    simulate(schedule_of(mode), 48, watchers=watchers)
    writers[0].close()
    assert not notes
    for path in files(tmp_path):
        check(lines(path))
    found = Counter(
        (s.track, s.name, s.key, round(s.start * 1e6), round(s.end * 1e6))
        for s in spans.read(tmp_path)
        if not s.facts.get("open") and s.name not in ("relabelled", "published", "step")
    )
    relabelled = {"wait_prev_gen", "wait_samples"}
    for counts in (found, reference.spans):
        for key in [k for k in counts if k[0] == "trainer" and k[1] in relabelled]:
            counts["trainer", "wait", *key[2:]] += counts.pop(key)
    assert found == reference.spans and len(found) > 500


def test_facts_of_both_ends_are_in_a_span(tmp_path: Path) -> None:
    Run(tmp_path, ["trace"]).go([1])
    found = spans.read(tmp_path)
    (request,) = [s for s in named(found, "rollout-0", "request") if s.key == "1/0"]
    assert request.facts == {"tokens": 2, "versions": [[0, 2]], "stop": "eos"}
    assert request.end - request.start == pytest.approx(0.75)
    (step,) = named(found, "trainer", "step")
    assert step.facts == {"samples": [0, 1], "version": 0, "parts": {"update_actor": 1.0}}
    assert step.end - step.start == pytest.approx(1.0)
    assert named(found, "samples", "sealed")[0].facts == {"version": "1"}


def test_later_attempts_begin_later_and_superseded_ones_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, ["trace"])
    run.go([1, 2])
    run.go([2])
    found = spans.read(tmp_path)
    assert sorted(s.attempt for s in named(found, "sync", "activate")) == [1, 1, 2]
    starts = [min(s.start for s in found if s.attempt == a) for a in (1, 2)]
    assert starts[0] == 0.0 and 0.0 < starts[1] < 60.0, "by the wall clock of their starts"
    assert found == sorted(found, key=lambda s: s.start)


def test_a_span_continues_from_file_to_file(tmp_path: Path) -> None:
    whole, parts = Run(tmp_path / "whole", ["trace"]), Run(tmp_path / "parts", ["trace"])
    for run in (whole, parts):
        run.folder.mkdir()
    whole.go(range(1, 100))
    parts.go(range(1, 100), trace={"file_mb": 0.02})
    assert len(files(parts.folder)) > 3

    def plain(folder: Path) -> list[Span]:
        return sorted(spans.read(folder), key=repr)

    assert plain(parts.folder) == plain(whole.folder)


def test_a_wait_has_the_name_that_was_found_at_its_end(tmp_path: Path) -> None:
    def work(watch: Watch) -> None:
        for seconds in (5.0, 1.0, 2.0):
            watch.state("trainer", "wait_samples")
            run.clock.now += seconds
            watch.state("trainer", "other")
        watch.at(
            "trainer", "relabelled", seconds=3.0, source="wait_samples", target="wait_prev_gen"
        )

    run = Run(tmp_path, ["trace"])
    run.go([1], work=work)
    waits = [s for s in spans.read(tmp_path) if s.name.startswith("wait_")]
    assert [(s.name, s.end - s.start) for s in waits[-3:]] == [
        ("wait_samples", pytest.approx(5.0)),
        ("wait_prev_gen", pytest.approx(1.0)),
        ("wait_prev_gen", pytest.approx(2.0)),
    ]


def test_a_file_of_a_killed_run_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    Run(tmp_path, ["trace"]).go([1, 2])
    (path,) = files(tmp_path)
    data, before = path.read_bytes(), -1
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        found = spans.read(tmp_path)
        assert len(found) >= before or size < 200
        before = len(found)
        assert all(s.end >= s.start for s in found)
    begun = b'{"pid":2,"tid":9000,"ph":"B","ts":0,"cat":"request","name":"request 9/9"}'
    path.write_bytes(data[: data.rindex(b"\n]")] + b",\n" + begun)
    cut = spans.read(tmp_path)
    last = max(s.end for s in cut)
    assert ("9/9", last) in {(s.key, s.end) for s in cut if s.facts.get("open")}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[\n",
        "mine",
        "[\n{}\n",
        '[\n{"pid":0,"tid":0,"ph":"M","ts":0,"name":"clock_zero","args":{"unix_s":"x"}}\n',
        "\0" * 5000,
    ],
)
def test_a_file_that_is_no_trace_is_left_out(text: str, tmp_path: Path) -> None:
    Run(tmp_path, ["trace"]).go([1])
    expected = spans.read(tmp_path)
    (tmp_path / "trace" / "attempt-002-000.json").write_text(text)
    (tmp_path / "trace" / "attempt-0x1.json").write_text("mine")
    os.mkfifo(tmp_path / "trace" / "attempt-003-000.json")
    (tmp_path / "trace" / "attempt-004-000.json").symlink_to("/dev/zero")
    assert spans.read(tmp_path) == expected and spans.read(tmp_path / "nothing") == []


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    Run(tmp_path, ["trace"]).go([1])
    (path,) = files(tmp_path)
    expected = spans.read(tmp_path)
    head, first, *rest = path.read_text().split("\n")
    bad = [
        '{"pid":1,"tid":1,"ph":"B","ts":1e999},',
        '{"pid":' + "9" * 50 + ',"tid":1,"ph":"E","ts":1},',
        '{"pid":77,"tid":1,"ph":"B","ts":1},',
        '{"pid":1,"tid":1,"ph":"","ts":1},',
        "[" * 3000,
        '{"pid":1,"tid":1,"ph":"E","ts":1,"args":[]},',
    ]
    path.write_text("\n".join([head, first, *bad, *rest]))
    assert spans.read(tmp_path) == expected
