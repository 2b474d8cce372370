"""What a report says, without a browser: times agree with the accounts, and bad folders do no harm."""

from __future__ import annotations

import gzip
import json
import os
import re
from base64 import b64decode
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import plotly.graph_objects as go
import pyarrow.parquet as pq
import pytest

from millrace.errors import ConfigError
from millrace.persist import accounts, ownership
from millrace.persist.run_reader import RunReader, load
from millrace.report.advice import Advice
from millrace.report.page import compare, curves, head
from millrace.report.page import timeline as timelines
from millrace.report.page.figures import STATES, rounded, state_of
from millrace.report.page.head import state_of as whether_complete
from millrace.report.page.samples import choose, count, read_table, read_texts
from millrace.report.page.timeline import NAMES, columns, lanes, timeline, windows
from millrace.report.page.totals import devices
from millrace.report.page.write import LIMIT, MARK, of_run, write_report
from millrace.report.trace import spans
from millrace.report.trace.spans import Span
from millrace.types import Author, Score, Segment, Thread, Trajectory, tokens_of
from tests.pipeline.simulated import RUNS
from tests.report.run_folders import keep_samples, renamed, write_config, write_metrics, write_run
from tests.report.runs import sample, segment
from tests.report.test_accounts import Tools

OWN_STATES = ("generate", "validate", "idle")


def data_of(page: Path, name: str) -> Any:
    """Return the data that a page carries."""
    packed = re.search(rf'id="data-{name}">([^<]*)<', page.read_text())
    assert packed
    return json.loads(gzip.decompress(b64decode(packed[1])))


@pytest.mark.parametrize("agents", [False, True])
@pytest.mark.parametrize("mode", [mode for mode in RUNS if "+" not in mode])
def test_the_timeline_agrees_with_the_accounts(tmp_path: Path, mode: str, agents: bool) -> None:
    options: dict[str, Any] = {"samples": 40, "agent": Tools(), "chance": None} if agents else {}
    folder = write_run(tmp_path / "run", mode=mode, **options)
    run = load(folder)
    assert run.agents == agents
    colocated = run.key("async_training.placement") == "colocated"
    found = columns(spans.read(folder))
    expected = RunReader(folder).read().accounts[-1].devices
    made = lanes(found, colocated=colocated)
    assert {lane.name for lane in made} == set(expected)
    for lane in made:
        times: dict[str, float] = defaultdict(float)
        for part, seconds in expected[lane.name].seconds.items():
            times[state_of(part)] += seconds
        drawn = dict.fromkeys(NAMES, 0.0)
        for start, end, state in zip(lane.starts, lane.ends, lane.states, strict=True):
            drawn[NAMES[state]] += end - start
        if lane.name == "trainer":  # the accounts do not divide its wait
            for merged in (drawn, times):
                for cause in ("rewards", "tools"):
                    merged["wait_trajectories"] += merged.pop(f"wait_{cause}", 0.0)
        else:
            assert not agents or times["wait_tools"] > 0
        for name in STATES:
            assert abs(drawn.get(name, 0) - times.get(name, 0)) <= 0.02 * found.end, (lane.name, name)  # fmt: skip


def test_other_spans_of_the_trainer_hide_no_part_of_its_time() -> None:
    def of(name: str, start: float, end: float, key: str = "") -> Span:
        return Span(1, "trainer", name, key, start, end, {})

    track = [of("wait_samples", 0, 1), of("train", 1, 3), of("step", 1, 3, "4"), of("stepped", 1, 1)]  # fmt: skip
    (lane,) = lanes(columns(track), colocated=False)
    assert [NAMES[state] for state in lane.states] == ["wait_trajectories", "train"]
    assert lane.starts.tolist() == [0, 1] and lane.ends.tolist() == [1, 3]


def test_an_idle_replica_has_the_state_of_all_idle_replicas_until_it_leaves() -> None:
    def of(track: str, name: str, start: float, end: float) -> Span:
        return Span(1, track, name, "", start, end, {})

    played = [of("rollout-1", "idle", 0, 2), of("rollout-1", "validate", 2, 5)]
    played += [of("rollout-1", "idle", 5, 8), of("rollout-1", "left", 8, 9)]
    played += [of("rollouts", "pause", 0, 1), of("rollouts", "wait_rewards", 0, 1)]
    played += [of("rollouts", "update_actor", 1, 2), of("rollouts", "none_idle", 2, 5)]
    (lane,) = lanes(columns(played), colocated=False)
    assert [NAMES[s] for s in lane.states] == ["wait_rewards", "train", "validate", "other"]
    assert lane.starts.tolist() == [0, 1, 2, 5] and lane.ends.tolist() == [1, 2, 5, 8]


def test_a_state_without_length_hides_no_other() -> None:
    """Attempts may touch: a clock was set back, or a time was rounded."""

    def of(attempt: int, name: str, start: float, end: float) -> Span:
        return Span(attempt, "rollout-0", name, "", start, end, {})

    played = [of(1, "validate", 200, 210), of(1, "generate", 210, 210)]
    played += [of(2, "generate", 100, 110), of(2, "validate", 110, 111)]
    (lane,) = lanes(columns(played), colocated=False)
    assert [NAMES[s] for s in lane.states] == ["validate", "generate", "validate"]


def test_a_response_that_was_lost_and_drawn_again_is_trained_once() -> None:
    def request(attempt: int, tokens: int) -> Span:
        facts = {"tokens": tokens, "stop": "eos"}
        return Span(attempt, "rollout-0", "request", "7/0", attempt, attempt + 0.5, facts)

    sealed = Span(2, "samples", "sealed", "7", 2.6, 2.7, {})
    found = columns([request(1, 10), request(2, 30), sealed]).lengths
    assert sorted(found.tolist()) == [[10, 0], [30, 1]]


def test_a_greedy_baseline_is_no_trained_response() -> None:
    facts = {"tokens": 10, "stop": "eos"}
    drawn = [Span(1, "rollout-0", "request", f"7/{k}", k, k + 1, facts) for k in range(3)]
    assert len(columns(drawn).lengths) == 3 and len(columns(drawn, n=2).lengths) == 2


def test_times_late_in_a_long_run_are_not_rounded(tmp_path: Path) -> None:
    """Five digits of 123,456.7 s are tens of seconds."""
    late = 123_456.0
    spans_ = [
        Span(1, "sync", "activate", str(v), late + 2 * v, late + 2 * v + 0.25, {}) for v in range(9)
    ]
    spans_ += [Span(1, "trainer", "train", "", late + k, late + k + 0.5, {}) for k in range(20)]
    spans_ += [Span(1, "run", "start", "", 0, 0, {})]
    found = columns(spans_)
    (chart, *_) = windows(found, lanes(found, colocated=False))
    bars = [trace for trace in chart["data"] if trace["type"] == "bar"]
    begin, end = chart["layout"]["xaxis"]["range"]
    assert end - begin == pytest.approx(6)
    assert {round(at % 1, 2) for trace in bars for at in trace["base"]} <= {0.0, 0.25}


def test_no_window_has_a_kill_and_its_resume_in_it() -> None:
    """Version 3 goes live again, long after version 4."""
    live = [(2.0, 0), (4.0, 1), (6.0, 2), (8.0, 3), (10.0, 4), (50.0, 3), (52.0, 4), (54.0, 5)]
    played = [Span(1, "sync", "activate", str(v), at - 0.1, at, {}) for at, v in live]
    played += [Span(1, "trainer", "train", "", 0, 54, {})]
    found = columns(played)
    for chart in windows(found, lanes(found, colocated=False)):
        begin, end = chart["layout"]["xaxis"]["range"]
        assert begin < end and (end <= 10 or begin >= 50)


def test_numbers_of_tokens_keep_their_digits() -> None:
    assert rounded([1_234_567, 0.123456789]) == [1_234_567, 0.12346]


def test_a_run_with_metrics_alone_has_its_whole_time_on_the_axis(tmp_path: Path) -> None:
    write_config(tmp_path)
    row = {"reward/mean": 1.0, "timing_s/step": 2.0, "timing_share/update_actor": 1.0}
    write_metrics(tmp_path, dict.fromkeys(range(1, 1001), row))
    run = load(tmp_path)
    (chart,) = timeline(run, columns([]))
    assert chart["layout"]["xaxis"]["range"] == [0, 2000]


def test_attempts_with_other_devices_and_prices_are_paid_each_by_its_own(tmp_path: Path) -> None:
    def line(attempt: int, count: int, price: float) -> accounts.Line:
        device = accounts.Device(count, {"train": 3600.0})
        return accounts.Line("end", attempt, 1, 0.0, 3600.0, 0, {}, devices={"trainer": device}, price=price)  # fmt: skip

    run = RunReader(tmp_path)
    run.accounts = [line(1, 2, 1.0), line(2, 4, 3.0)]
    shares, money = devices(run)
    assert shares["rows"][0][-1] == "0.0 %" and shares["rows"][0][1] == "100.0 %"
    assert money["rows"][-1][1:] == ["devices x seconds of each attempt = 21,600", "21,600", "100.0 %", "14.00"]  # fmt: skip


def test_the_comparison_weighs_versions_by_their_time(tmp_path: Path) -> None:
    """100 samples in 1 s and 100 in 99 s are 2 samples/s, not 50.5."""
    write_config(tmp_path)
    rows = {1: {"perf/samples_per_s": 100.0, "timing_s/step": 1.0}}
    rows[2] = {"perf/samples_per_s": 100 / 99, "timing_s/step": 99.0}
    write_metrics(tmp_path, rows)
    table = compare.of_runs([load(tmp_path)] * 2)["sections"][0]["blocks"][0]
    assert {row[0]: row[1] for row in table["rows"]}["samples/s of all versions"] == "2"


def test_a_comparison_says_what_could_not_be_read(tmp_path: Path) -> None:
    good, bad = write_run(tmp_path / "good"), write_run(tmp_path / "bad")
    (bad / "metrics.jsonl").write_text("no JSON\n")
    (bad / "history.jsonl").write_text("no JSON\n" * 2)
    blocks = compare.of_runs([load(good), load(bad)])["sections"][0]["blocks"]
    said = [block["text"] for block in blocks if block["type"] == "text"]
    assert "Not readable in bad: metrics.jsonl: 1 lines are not readable" in said
    assert not any("Not readable in good" in words for words in said)
    state = next(row for row in blocks[0]["rows"] if row[0] == "state")
    assert state[2] == "unknown: history.jsonl is not readable"


def test_every_chart_is_a_valid_figure_of_plotly(tmp_path: Path) -> None:
    page, _ = of_run(load(write_run(tmp_path / "run")))
    figures = [b for s in page["sections"] for b in s["blocks"] if b["type"] == "figure"]
    assert len(figures) >= 8
    for block in figures:
        go.Figure(data=block["data"], layout=block["layout"])  # raises for an unknown setting
        assert len(block["how"]) > 40 and block["how"].endswith(".")


def test_sentences_name_keys_that_exist(tmp_path: Path) -> None:
    page, _ = of_run(load(write_run(tmp_path / "run")))
    texts = json.dumps(page["sections"])
    looks = " ".join(look.lifts for look in STATES.values())
    named = re.findall(r"`([a-z_]+\.[a-z_.]+)[`=]", texts + looks)
    assert len(set(named)) > 15
    assert not {name for name in named if name not in page["keys"]}


@pytest.mark.parametrize("made", ["nothing", "a file", "another folder", "other lines"])
def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path, made: str) -> None:
    path = tmp_path / "x"
    if made == "a file":
        path.write_text("")
    elif made == "another folder":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    elif made == "other lines":
        path.mkdir()
        (path / "metrics.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match=r"RUN = .*Fix: a folder such as"):
        write_report([path])
    assert not (path / "report.html").exists()


def test_damaged_accounts_are_counted_and_named_where_advice_is_missing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = run / "accounts.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line[: len(line) // 2] + "\n" for line in whole[1:]) + whole[0] + "{")
    folder = load(run)
    note = f"accounts.jsonl: {len(whole) - 1} lines are not readable"
    assert note in folder.notes and len(folder.accounts) == 1
    page, _ = of_run(folder)
    assert f"Files are damaged: {note}" in json.dumps(page["sections"])


def test_a_file_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_metrics(tmp_path, {1: {"reward/mean": 1.0}})
    mine, target = tmp_path / "mine.html", tmp_path / "target"
    mine.write_text("mine")
    with pytest.raises(ConfigError, match="is not a report"):
        write_report([tmp_path], mine)
    with pytest.raises(ConfigError, match="is a folder"):
        write_report([tmp_path], tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report([tmp_path], tmp_path / "absent" / "report.html")
    target.write_text("mine")
    (tmp_path / "report.html").symlink_to(target)
    first = write_report([tmp_path])
    assert target.read_text() == mine.read_text() == "mine"
    assert not first.is_symlink() and MARK in first.read_text()
    assert write_report([tmp_path]) == first  # its own report is overwritten


def test_damaged_files_are_named_and_do_no_harm(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"version": 1e999, "reward/mean": 1}\n{"version": -3}\n[1]\n{"version": 9, "r')
    with (folder / "accounts.jsonl").open("a") as file:
        file.write('{"event": 3}\n{"half')
    (folder / "config.yaml").write_text("a: [1\n  b")
    (folder / "samples" / "version-000099-attempt-001.parquet").write_bytes(b"PAR1 no")
    (folder / "trace" / "attempt-009-000.json").write_text("no trace")
    (folder / "history.jsonl").write_bytes(b"\xff\xfe\n")
    notes = json.dumps(data_of(write_report([folder]), "page"))
    for words in ("metrics.jsonl: 3 lines", "config.yaml: ", "history.jsonl"):
        assert f"Not readable: {words}" in notes


def test_the_page_says_whether_the_run_goes_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    whole = (folder / "history.jsonl").read_bytes()
    assert whether_complete(load(folder)) == "complete"
    (folder / "history.jsonl").write_bytes(whole[: whole[:-1].rfind(b"\n") + 1])
    assert "still going on" in whether_complete(load(folder))
    for path in folder.rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert re.search(
        r"not complete.*Attempt 1 killed at version \d+", whether_complete(load(folder))
    )
    write_report([folder])


def test_the_samples_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    write_config(tmp_path)
    write_metrics(tmp_path, {1: {"reward/mean": 1.0}})
    texts = iter(noise.integers(0x4E00, 0x9000, (400, 3000)))
    keep_samples(
        tmp_path,
        {v: [renamed(sample(10 * v + i), text="".join(map(chr, next(texts)))) for i in range(10)] for v in range(1, 41)},
    )  # fmt: skip
    page = write_report([tmp_path])
    assert 0.9 * LIMIT < page.stat().st_size < LIMIT
    data = data_of(page, "samples")
    versions = {s["version"] for s in data["samples"]}
    assert data["total"] == 400 and 20 < len(data["samples"]) < 400
    assert {1, 40} <= versions and len(versions) > 8


def test_the_choice_begins_with_evenly_spaced_versions_and_extremes(tmp_path: Path) -> None:
    keep_samples(tmp_path, {v: [sample(v)] for v in range(1, 65)})
    table = read_table(tmp_path)
    best = next(iter((tmp_path / "samples").glob("version-000037-*")))
    rows = pq.read_table(best).to_pylist()
    rows[0]["reward"] = 100.0
    pq.write_table(type(pq.read_table(best)).from_pylist(rows, pq.read_schema(best)), best)
    table = read_table(tmp_path)
    first = [sample_id for _, sample_id in choose(table)[:9]]
    assert count(table) == 64 and {1, 33, 37, 64} <= set(first)


def test_lengths_are_counted_in_whole_tokens() -> None:
    lengths = np.array([5, 6, 6, 8])
    chart = curves.lengths(lengths, lengths, "all")["data"][0]
    assert chart["x"] == list(range(9)) and chart["y"] == [0, 0, 0, 0, 0, 25, 50, 0, 25]
    many = curves.lengths(np.arange(1, 1001), lengths, "all")["data"][0]
    assert len(many["x"]) == 40 and sum(many["y"]) == pytest.approx(100)


def test_a_trace_that_lacks_an_attempt_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    run, found = load(folder), columns(spans.read(folder))
    (whole, *_) = timelines.timeline(run, found)
    assert "The trace has" not in whole["note"]
    last = run.accounts[-1]
    run.accounts.append(msgspec.structs.replace(last, attempt=9, seconds=3 * last.seconds))
    (part, *_) = timelines.timeline(run, found)
    assert "The trace has" in part["note"] and "`report.trace`" in part["note"]


def test_advice_says_what_it_is_and_links_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load(write_run(tmp_path / "run"))
    one = Advice("Set a.b=2 and a.b=25, not xa.b=2", ("a.b=2", "a.b=25"), 0.1, 0.05, 0.2)
    monkeypatch.setattr(head, "advise", lambda folder, wait: [one])
    how, box = head.advice(run)
    assert "samples that are trained per second" in how["text"]
    assert box["text"] == "Set `a.b=2` and `a.b=25`, not xa.b=2 (+10%, from +5% to +20%)"
    run.accounts = []
    assert "accounts.jsonl is missing" in head.advice(run)[0]["text"]


def test_a_run_that_has_not_trained_yet_is_a_run(tmp_path: Path) -> None:
    (tmp_path / ownership.MARKER).touch()
    with pytest.raises(ConfigError, match=r"has not trained yet.*millrace watch"):
        load(tmp_path)


def test_a_run_without_agents_has_no_section_of_agents(tmp_path: Path) -> None:
    run = load(write_run(tmp_path / "run", samples=16))
    assert not run.agents and not curves.agents(run)


def test_the_section_of_agents_sums_dead_turns_and_counts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", samples=40, agent=Tools(), chance=None)
    run = load(folder)
    for row in run.rows.values():
        row["agents/tool_calls"] = 3.0
    turns, ended, sessions, counts = curves.agents(run)
    dead = sum(row["agents/dead_turns"] for row in run.rows.values())
    assert dead and f"{dead:,.0f} turns were dead" in turns["how"]
    assert [line["name"] for line in turns["data"]][2:] == ["threads, mean", "threads, most"]
    assert [area["name"] for area in ended["data"]] == ["done"]
    assert set(ended["data"][0]["y"]) == {100.0}
    assert {area["name"] for area in sessions["data"]} >= {"draw", "wait for a tool"}
    assert counts["rows"] == [["tool_calls", str(3 * len(run.rows))]]


def _response(folder: Path, *threads: Thread, messages: Any = ()) -> dict[str, Any]:
    """Return what the browser gets for a trajectory."""
    write_config(folder)
    one = Trajectory(threads, Score(1.0), "turns", messages)
    keep_samples(folder, {1: [replace(sample(0), trajectories=(one,))]})
    table = read_table(folder)
    ((made,),) = (s["responses"] for s in read_texts(table, choose(table)).values())
    assert isinstance(made, dict)
    return made


def test_the_browser_names_who_said_what(tmp_path: Path) -> None:
    call = {"function": {"name": "look", "arguments": '{"at": 5}'}}
    messages = (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "<b>go</b>"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "8"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": [{"type": "text", "text": "more"}]},
        {"role": "assistant", "content": "B"},
    )
    heard = lambda i: Segment(tokens_of([i]), Author.ENVIRONMENT)  # noqa: E731
    said = lambda i: segment(0, [i])  # noqa: E731
    thread = Thread((said(65), heard(70), said(66), heard(71), said(67)))
    made = _response(tmp_path, thread, messages=messages)
    assert [part[1] for part in made["segments"]] == ["policy", "tool", "policy", "user", "policy"]
    assert (made["ended"], made["threads"]) == ("turns", 1)
    assert made["messages"][2:4] == [["assistant", 'calls look({"at": 5})'], ["tool", "7"]]
    assert json.loads(made["messages"][6][1]) == messages[6]["content"]


def test_parts_that_fit_no_messages_keep_their_author(tmp_path: Path) -> None:
    opened = Thread((segment(0, [66]),), tokens_of([88]))
    first = Thread((segment(0, [65]), Segment(tokens_of([70]), Author.ENVIRONMENT)))
    messages = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "A"})
    made = _response(tmp_path, first, opened, messages=messages)
    assert [p[1] for p in made["segments"]] == ["policy", "environment", "opening", "policy"]
    assert made["threads"] == 2


def test_a_long_conversation_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    messages = tuple({"role": "user", "content": str(i)} for i in range(1000))
    said = _response(tmp_path, Thread((segment(0, [65]),)), messages=messages)["messages"]
    assert [text for _, text in said[:2]] == ["0", "1"] and said[-1] == ["user", "999"]
    assert ["…", "[940 messages are left out]"] in said and len(said) == 61
