"""The report of a run with agents: waits for tools, threads, turns, and who said what."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.persist.run_reader import RunReader, load
from millrace.report.page import curves
from millrace.report.page.lanes import NAMES, columns, lanes
from millrace.report.page.samples import choose, read_table, read_texts
from millrace.report.page.states import STATES, state_of
from millrace.report.trace import spans
from millrace.types import Author, Score, Segment, Thread, Trajectory, tokens_of
from tests.pipeline.simulated import RUNS
from tests.report.run_folders import keep_samples, write_config, write_run
from tests.report.runs import sample, segment
from tests.report.test_accounts_agents import Tools


@pytest.mark.parametrize("mode", [mode for mode in RUNS if "+" not in mode])
def test_the_timeline_of_agents_agrees_with_the_accounts(tmp_path: Path, mode: str) -> None:
    folder = write_run(tmp_path / "run", mode=mode, samples=40, agent=Tools(), chance=None)
    run = load(folder)
    assert run.agents
    colocated = run.key("async_training.placement") == "colocated"
    found = columns(spans.read(folder))
    expected = RunReader(folder).read().accounts[-1].devices
    made = lanes(found, colocated=colocated)
    for lane in made:
        times: dict[str, float] = defaultdict(float)
        for part, seconds in expected[lane.name].seconds.items():
            times[state_of(part)] += seconds
        if lane.name != "trainer":
            assert times["wait_tools"] > 0
            drawn = dict.fromkeys(NAMES, 0.0)
            for start, end, state in zip(lane.starts, lane.ends, lane.states, strict=True):
                drawn[NAMES[state]] += end - start
            for name in STATES:
                near = 0.02 * found.end
                assert abs(drawn[name] - times.get(name, 0.0)) <= near, (lane.name, name)


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
