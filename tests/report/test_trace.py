"""The trace: its format by the published rules, its spans, and what becomes of it when things go wrong.

The rules: "Trace Event Format" of Chrome, and the importer of Perfetto. Perfetto itself is not in
any package that a test could install.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from millrace.report.trace import spans
from millrace.report.trace.spans import Span, read
from millrace.report.trace.writer import TraceWriter
from millrace.waits.registry import Event
from tests.pipeline.simulated import RUNS, schedule_of, simulate
from tests.report.runs import Clock, Run, Watch, life


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file, which has one on each line."""
    head, *texts = path.read_text().split("\n")
    assert head == "["
    return [json.loads(text.rstrip(",")) for text in texts if text.rstrip(",]")]


def files(folder: Path) -> list[Path]:
    return sorted((folder / "trace").iterdir())


def check(events: list[dict[str, Any]], *, whole: bool = True) -> None:
    """Check the rules for one file. A `whole` trace has no other file."""
    first = events[0]
    assert first["ph"] == "M" and first["name"] == "clock_zero" and first["args"]["unix_s"] > 1e9
    pids, tids, stacks = set[int](), set[int](), defaultdict[int, list[str]](list)
    last: dict[int, float] = {}
    begins: set[int] = set()
    process_of: dict[int, int] = {}
    for e in events[1:]:
        assert process_of.setdefault(e["tid"], e["pid"]) == e["pid"] or e["tid"] == 0
        if e["ph"] == "M":
            if e["name"] == "process_name":
                pids.add(e["pid"])
            tids.add(e["tid"])
            continue
        assert e["pid"] in pids and e["tid"] in tids, "each lane has a name"
        assert e["tid"] not in pids, "no lane is the main thread of a process"
        assert e["ts"] >= last.get(e["tid"], 0), "times of a lane are sorted"
        last[e["tid"]] = e["ts"] + e.get("dur", 0)
        if e["ph"] == "B":
            assert not stacks[e["tid"]], "a lane has one slice at a time"
            stacks[e["tid"]].append(e["name"])
        elif e["ph"] == "E":
            assert stacks[e["tid"]].pop()
        else:
            assert e["ph"] in "XiC" and e["name"]
        if e.get("flow_out"):
            assert e["bind_id"] not in begins, "an arrow begins once"
            begins.add(e["bind_id"])
    assert not any(stacks.values()), "each begin has its end"
    ends = {e["bind_id"] for e in events if e.get("flow_in")}
    assert not whole or ends <= begins, "each arrow that ends has begun"


def test_a_trace_keeps_the_rules_of_the_format(tmp_path: Path) -> None:
    run = Run(tmp_path, ["trace"])
    run.go([1, 2, 3])
    (path,) = files(tmp_path)
    events = lines(path)
    check(events)
    assert json.loads(path.read_text()) == events, "a closed file is whole JSON"
    assert path.name == "attempt-001-000.json" and not run.notes


def test_overlapping_requests_have_lanes_and_a_free_lane_is_taken_again(tmp_path: Path) -> None:
    Run(tmp_path, ["trace"]).go([1, 2])
    events = lines(files(tmp_path)[0])
    requests = [e for e in events if e["ph"] == "X" and e.get("cat") == "request"]
    names = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    assert len(requests) == 8
    assert {names[e["tid"]] for e in requests} == {"request 0", "request 1"}


def test_arrows_lead_from_a_sample_to_its_requests_and_from_a_step_to_its_version(
    tmp_path: Path,
) -> None:
    Run(tmp_path, ["trace"]).go([1, 2])
    events = sorted(lines(files(tmp_path)[0]), key=lambda e: float(e["ts"]))

    def arrows(kind: str) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for e in events:
            if e.get(kind):
                found.setdefault(e["bind_id"], []).append(e["name"])
        return found

    begins, ends = arrows("flow_out"), arrows("flow_in")
    led = {name: ends.get(bind, []) for bind, (name,) in begins.items()}
    assert led["running 3"] == ["request 3/0", "request 3/1", "score 3", "score 3"]
    assert led["step 0"] == ["trained 0", "trained 1", "transfer 1"]
    assert led["step 1"] == ["trained 2", "trained 3", "transfer 2"]


def test_the_arrow_of_a_version_that_is_made_live_again_begins_once(tmp_path: Path) -> None:
    """A replica that comes back gets the version of the others again."""

    def work(watch: Watch) -> None:
        for version in ("0", "1", "1", "2", "2"):
            with watch.span("sync", "activate", version):
                pass

    Run(tmp_path, ["trace"]).go([1], work=work)
    events = lines(files(tmp_path)[0])
    check(events)
    begun = [e["name"] for e in events if e.get("flow_out") and e["cat"] == "activate"]
    assert begun == ["activate 1", "activate 2"], "0 came after 1"


def test_a_killed_run_leaves_a_file_that_opens(tmp_path: Path) -> None:
    """Perfetto and Chrome need no end of the array. Each line before the last one is whole."""
    code = f"""
import os, time
from pathlib import Path
from tests.report.runs import Watch
from millrace.report.trace.spans import read
from millrace.report.trace.writer import TraceWriter
from tests.report.runs import Clock, life
clock = Clock()
path = Path({str(tmp_path)!r})
watch = Watch(clock, [TraceWriter(path, 1, clock, print, every_s=0.01)])
life(watch, clock, 1, [0, 1])
trace = path / "trace" / "attempt-001-000.json"
while not trace.exists() or "reward/mean" not in trace.read_text():
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -9 and not done.stdout, done.stderr
    text = files(tmp_path)[0].read_text()
    assert not text.endswith("]\n")
    json.loads(text.rstrip(",\n") + "]")


def test_a_full_file_is_followed_by_another_one_that_stands_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, ["trace"])
    run.go(range(1, 200), trace={"file_mb": 0.05})
    assert len(files(tmp_path)) > 2 and not run.notes
    for path in files(tmp_path):
        events = lines(path)
        check(events, whole=False)
        assert path.stat().st_size < 0.05 * 2**20 + 300 * 256
    assert [p.name for p in files(tmp_path)][1] == "attempt-001-001.json"


def test_attempts_have_files_of_their_own_and_share_the_limit(tmp_path: Path) -> None:
    run = Run(tmp_path, ["trace"])
    run.go(range(1, 1200), trace={"limit_mb": 1})
    (note,) = run.notes
    assert "1 MiB" in note and "report.trace_mb" in note and "continues" in note
    run.go(range(1, 1200), trace={"limit_mb": 1})
    assert len(run.notes) == 2
    run.go([1, 2, 3], trace={"limit_mb": 2})
    assert len(run.notes) == 2
    assert sum(p.stat().st_size for p in files(tmp_path)) < 2 * 2**20
    check(lines(files(tmp_path)[-1]))


@pytest.mark.parametrize("limit", range(0, 3000, 150))
def test_a_limit_at_any_byte_ends_the_trace_once_and_leaves_whole_files(
    tmp_path: Path, limit: int
) -> None:
    """Each batch has a file of its own here. So the limit is also between two files."""
    clock, notes = Clock(), list[str]()
    limit_mb = limit / 2**20
    writer = TraceWriter(
        tmp_path, 1, clock, notes.append, limit_mb=limit_mb, file_mb=0, every_s=0.001
    )
    watch = Watch(clock, [writer])
    for number in range(40):
        watch.emit("rollout-0", "request", "begin", f"{number}/0", {})
        time.sleep(0.002)
    writer.close()
    assert len(notes) == 1
    for path in files(tmp_path):
        assert json.loads(path.read_text())[0]["name"] == "clock_zero"


def test_an_attempt_without_room_leaves_no_file(tmp_path: Path) -> None:
    run = Run(tmp_path, ["trace"])
    run.go([1, 2], trace={"limit_mb": 0})
    assert len(run.notes) == 1 and not files(tmp_path)


def test_a_foreign_file_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    folder.mkdir()
    (folder / "attempt-001-000.json").write_text("mine")
    Run(tmp_path, ["trace"]).go([1])
    assert (folder / "attempt-001-000.json").read_text() == "mine"
    check(lines(folder / "attempt-001-001.json"))


def test_a_linked_folder_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "trace").symlink_to(elsewhere)
    Run(tmp_path, ["trace"]).go([1])
    assert not list(elsewhere.iterdir()) and len(files(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_ends_the_trace_with_one_note(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("a file of the user")
    run = Run(tmp_path, ["trace"])
    run.go([1, 2])
    (note,) = run.notes
    assert "cannot be written" in note and (tmp_path / "trace").read_text() == "a file of the user"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_trace_with_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def full(path: Path, *how: Any, **options: Any) -> Any:
        return opened(Path("/dev/full"), "r+b", buffering=0)

    monkeypatch.setattr(Path, "open", full)
    run = Run(tmp_path, ["trace"])
    run.go([1, 2])
    (note,) = run.notes
    assert "No space left" in note


def test_a_disk_that_hangs_costs_events_and_no_time(tmp_path: Path) -> None:
    """A pipe that nobody reads is such a disk."""
    reader, pipe = os.pipe()
    released = threading.Event()
    notes: list[str] = []
    clock = Clock()

    class Stuck(TraceWriter):
        def _put(self, data: bytes) -> None:
            released.wait()
            super()._put(data)

    writer = Stuck(tmp_path, 1, clock, notes.append, most_events=100, close_s=60)
    watch = Watch(clock, [writer])
    for version in range(1, 40):
        life(watch, clock, version, [version])
    assert writer.dropped > 100 and len(notes) == 1 and "too slow" in notes[0]
    released.set()
    while len(writer._events) > 40:
        threading.Event().wait(0.01)
    life(watch, clock, 99, [99])
    writer.close()
    os.close(reader)
    os.close(pipe)
    events = lines(files(tmp_path)[0])
    gap = next(e for e in events if e.get("name") == "gap")
    assert gap["args"]["events"] == writer.dropped and len(notes) == 1
    stacks: dict[int, int] = defaultdict(int)
    for e in events:
        stacks[e["tid"]] += {"B": 1, "E": -1}.get(e["ph"], 0)
        assert 0 <= stacks[e["tid"]] <= 1
    assert any(e.get("name") == "activate 99" for e in events), "the trace goes on"


def test_facts_of_any_kind_are_written(tmp_path: Path) -> None:
    def work(watch: Watch) -> None:
        watch.at("run", "alarm", "a/b", text="\ud800 \n" * 400, value=2**80, x=object())
        watch.at("run", "odd", big=[list(range(5000))], nan=float("nan"), none=None)
        with (
            watch.span("rollout-0", "request", "val/3"),
            watch.span("x", "y", "9\ud800" * 5000),
        ):
            pass

    run = Run(tmp_path, ["trace"])
    run.go([1], work=work)
    events = lines(files(tmp_path)[0])
    check(events)
    assert not run.notes
    facts = {e.get("name"): e.get("args", {}) for e in events}
    assert facts["alarm a/b"]["value"] == str(2**80) and "x" not in facts["alarm a/b"]
    assert len(facts["odd"]["big"][0]) == 1024 and facts["odd"]["nan"] is None


@pytest.mark.parametrize(
    "facts",
    [{None: 1}, {(1, 2): 1}, {True: 1}, {"\ud800": 1}, {"a" * 600 + "\ud800": 1}, {"a": 10**5000}],
    ids=["none", "tuple", "bool", "surrogate", "long", "digits"],
)
def test_no_fact_ends_the_trace(tmp_path: Path, facts: dict[Any, Any]) -> None:
    run = Run(tmp_path, ["trace"])
    run.go([1], work=lambda watch: watch.emit("run", "odd", "at", "", facts))
    check(lines(files(tmp_path)[0]))
    assert not run.notes
    (odd,) = [span for span in read(tmp_path) if span.name == "odd"]
    assert odd.facts


@pytest.mark.parametrize("value", [2**63, 2**64, -(2**63) - 1, 2**100, 10**400])
def test_a_whole_number_of_more_than_64_bits_is_a_text(tmp_path: Path, value: int) -> None:
    """A reader of JSON refuses such a number, with its whole line, or rounds it."""
    least = -(2**63)

    def work(watch: Watch) -> None:
        with watch.span("q", "y", "1", value=value, nested=[{"a": value}], least=least) as end:
            end["share"] = 0.0001234567890123456789

    run = Run(tmp_path, ["trace"])
    run.go([1], work=work)
    (span,) = [span for span in read(tmp_path) if span.name == "y"]
    text = span.facts["value"]
    assert int(text, 0) == value and span.facts["nested"] == [{"a": text}]
    assert span.facts["least"] == least and span.facts["share"] == 0.0001234567890123456789


def test_a_slice_that_lasts_is_written_before_its_end(tmp_path: Path) -> None:
    """A kill loses the slices of the last second alone."""
    clock = Clock()
    writer = TraceWriter(tmp_path, 1, clock, print, every_s=0.01)
    watch = Watch(clock, [writer])

    with watch.span("rollout-0", "request", "1/1"):
        clock.now += 0.5
        with watch.span("rollout-0", "request", "2/1"):
            clock.now += 0.9
            trace = tmp_path / "trace" / "attempt-001-000.json"
            while not trace.exists() or "request 1/1" not in trace.read_text():
                time.sleep(0.01)
            assert "request 2/1" not in trace.read_text()
    writer.close()
    events = lines(files(tmp_path)[0])
    check(events, whole=False)
    assert [(e["ph"], e["ts"], e.get("dur"), e.get("cat")) for e in events if e["ph"] in "BEX"] == [
        ("B", 0, None, "request"),
        ("X", 500_000, 900_000, "request"),
        ("E", 1_400_000, None, None),
    ]
    found = {(s.name, s.key, s.start, s.end) for s in read(tmp_path)}
    requests = {("request", "1/1", 0, 1.4), ("request", "2/1", 0.5, 1.4)}
    assert found == requests


def test_the_end_of_a_run_ends_what_is_open(tmp_path: Path) -> None:
    run = Run(tmp_path, ["trace"])
    clock = run.clock
    writer = TraceWriter(tmp_path, 7, clock, run.notes.append)
    watch = Watch(clock, [writer])
    with watch.span("rollout-0", "request", "1/1"):
        clock.now += 1
        writer.close()
    events = lines(files(tmp_path)[0])
    check(events, whole=False)
    assert events[-1]["args"] == {"open": True} and events[-1]["dur"] == 1e6


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
