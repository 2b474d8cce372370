"""The tools of benchmarks/peers that need no GPU: problems, scorers, events, table, time limit."""

from __future__ import annotations

import json
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
PROBLEMS = runpy.run_path(str(PEERS / "problems.py"))
ASKED = [(12, 7), (49, 9), (30, 1), (25, 5), (10, 2), (11, 3), (44, 4), (38, 8)]


def run(script: str, *arguments: str | Path, code: int = 0) -> str:
    command = [sys.executable, str(PEERS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout


def score(text: str) -> float:
    return float(PROBLEMS["compute_score"]("eight", text, json.dumps(ASKED)))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("\n".join(f"{i}. {a} + {b} = {a + b}" for i, (a, b) in enumerate(ASKED, 1)), 1.0),
        ("\n".join(f"{a} + {b} = {a + b}" for a, b in ASKED[:4]), 0.5),
        ("12 + 7 = 19 and once more 12 + 7 = 19", 0.125),
        ("12 + 7 = 0, no, 12 + 7 = 19", 0.0),
        ("12 + 7 = 190\n49 + 9 = 58.5\n112 + 7 = 19", 0.0),
        ("\n".join(str(a + b) for a, b in ASKED), 0.0),
        ("", 0.0),
    ],
)
def test_a_sum_counts_if_its_first_statement_is_right(text: str, right: float) -> None:
    assert score(text) == right


def test_the_last_number_is_the_answer_of_a_sum() -> None:
    texts = ["It is 1,234.", "1234 or 7", "none", [{"content": "so 1234"}]]
    scored = PROBLEMS["trl_reward"](texts, ["1234"] * 4, ["sum_2x2"] * 4)
    assert scored == [1.0, 0.0, 0.0, 1.0]


def test_no_held_out_problem_is_trained_and_an_echo_earns_nothing() -> None:
    train, val = PROBLEMS["sums"](random.Random(0))
    asked = [{row["prompt"][-1]["content"] for row in rows} for rows in (train, val)]
    assert (len(train), len(val), len(asked[1])) == (4098, 258, 258)
    assert not asked[0] & asked[1]

    train, val = PROBLEMS["eight"](random.Random(0))
    truths = [[row["reward_model"]["ground_truth"] for row in rows] for rows in (train, val)]
    pairs = [{tuple(pair) for truth in each for pair in json.loads(truth)} for each in truths]
    assert not pairs[0] & pairs[1]
    for row in (train[0], val[0]):
        chat = "\n".join(message["content"] for message in row["prompt"])
        truth = row["reward_model"]["ground_truth"]
        assert PROBLEMS["compute_score"]("eight", chat, truth) == 0.0


def write(file: Path, *events: dict[str, Any]) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    return file


def arm(name: str, steps: int = 12, warm: bool = False) -> dict[str, Any]:
    head = {"event": "start", "t": 100.0, "arm": name, "task": "sums", "seed": 0}
    return head | {"steps": steps, "warm": warm}


def step(t: float, done: int, reward: float, steps: int = 2) -> dict[str, Any]:
    head = {"event": "step", "t": t, "step": done, "steps": steps}
    return head | {"reward": reward, "tokens": 1000}


def test_the_table_has_the_figures_of_hand_made_arms(tmp_path: Path) -> None:
    begin, end = {"event": "begin", "t": 130.0}, {"event": "end", "t": 190.0, "code": 0}
    rewards = (0.0, 0.2, 0.4, 0.4, 0.6, 0.6)
    curve = [step(132.0 + 2 * i, 2 + 2 * i, reward) for i, reward in enumerate(rewards)]
    values = {"val/a/mean@2": 0.25, "val/b/mean@2": 0.75}
    yardstick = [arm("millrace:async_partial"), begin, *curve]
    held_out = {"event": "val", "values": values}
    files = [write(tmp_path / "A" / "one.jsonl", *yardstick, held_out, end)]
    late = [{**event, "t": event["t"] + 12} for event in curve]  # 24 s in place of 12
    files.append(write(tmp_path / "A" / "two.jsonl", arm("verl:sync"), begin, *late, end))
    faster = [{**event, "t": 130 + (event["t"] - 130) / 2} for event in curve]  # 6 s
    files.append(write(tmp_path / "B" / "one.jsonl", *yardstick[:2], *faster, end))
    files.append(
        write(tmp_path / "B" / "two.jsonl", arm("verl:sync", warm=True), begin, *curve, end)
    )
    cut = {**end, "code": 124}
    files.append(write(tmp_path / "B" / "cut.jsonl", arm("trl:async"), begin, *curve[:2], cut))

    head, _, *rows = run("table.py", *files).splitlines()
    assert head.startswith("| arm | task | machine | start s | RL s | s to 0.3 | 0.4 | 0.5 |")
    # The means of eight steps are 0.25, 0.4 and 0.5, from the fourth line on.
    assert rows == [
        "| millrace:async_partial | sums | A, B | 30.0 (30.0 to 30.0) | 9.0 (6.0 to 12.0) "
        "| 7.5 (5.0 to 10.0) | 7.5 (5.0 to 10.0) | 9.0 (6.0 to 12.0) | 0.500 "
        "| 0.600 (0.600 to 0.600) | 750 (500 to 1000) | 1.00 (1.00 to 1.00) |",
        "| verl:sync | sums | A, B | 30.0 | 18.0 (12.0 to 24.0) "
        "| 16.0 (10.0 to 22.0) | 16.0 (10.0 to 22.0) | 18.0 (12.0 to 24.0) |  "
        "| 0.600 (0.600 to 0.600) | 375 (250 to 500) | 2.00 (2.00 to 2.00) |",
        "| trl:async (cut off after 4 of 12 steps, 4.0 s) | sums | B | 30.0 |  |  |  |  |  |  "
        "| 500 |  |",
    ]


def test_a_run_of_millrace_becomes_events_without_its_validations(tmp_path: Path) -> None:
    events = write(tmp_path / "A" / "arm.jsonl", arm("millrace:async_swap", 4))
    version = {"reward/mean": 0.5, "train/optimizer_steps": 2.0, "response_length/mean": 20.0}
    version |= {"staleness/hist/0": 256.0, "staleness/hist/1": 256.0, "timing_s/step": 3.0}
    last = {**version, "timing_s/step": 9.0, "timing_s/validate": 4.0}
    scores = {"val/a/mean@2": 0.5, "val/a/greedy": 1.0}
    write(tmp_path / "run" / "start.jsonl", {"seconds": 40.0})
    write(tmp_path / "run" / "metrics.jsonl", version, {**last, **scores})

    run("millrace_events.py", tmp_path / "run", events)
    step = {"event": "step", "steps": 2, "reward": 0.5, "tokens": 10240}
    assert [json.loads(line) for line in events.read_text().splitlines()][1:] == [
        {"event": "begin", "t": 140.0},
        step | {"t": 143.0, "step": 2},
        step | {"t": 148.0, "step": 4},
        {"event": "val", "values": {"val/a/mean@2": 0.5}},
    ]


def test_a_command_leaves_no_process_and_keeps_its_exit_code() -> None:
    daemon = "setsid sleep 1000 > /dev/null 2>&1 & echo $!; exit 3"
    pid = int(run("within.py", "1000", "bash", "-c", daemon, code=3))
    assert not psutil.pid_exists(pid)


def test_a_command_ends_at_its_limit() -> None:
    assert "limit of 0.1 s" in run("within.py", "0.1", "sleep", "1000", code=124)


@pytest.mark.parametrize(
    "wrong",
    [
        ("tlr:async", "sums", "0", "0,1"),
        ("trl:async", "mul", "0", "0,1"),
        ("trl:async", "sums", "0", "0"),
    ],
)
def test_a_wrong_arm_is_refused_before_anything_starts(wrong: tuple[str, ...]) -> None:
    command = ["bash", str(PEERS / "arm.sh"), *wrong, "9"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MODEL": "/"})
    assert done.returncode == 2 and "Fix:" in done.stderr
