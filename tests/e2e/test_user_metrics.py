"""Metrics of a function in a file of the user's, in the row of each version, and their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.observe.user_metrics import UserMetrics
from tests.e2e import runs

METRICS = """
import time
from pathlib import Path

import numpy

seen = Path(__file__).with_name("seen.txt")

def lengths(samples, decode):
    tokens = [len(t.tokens) for s in samples for t in s.trajectories]
    scores = [t.score.value for s in samples for t in s.trajectories]
    with seen.open("a") as file:
        file.write(f"{[s.prompt.index for s in samples]}\\n")
    texts = {decode(t.tokens) for s in samples for t in s.trajectories}
    return {"length": numpy.mean(tokens), "score": sum(scores) / len(scores), "texts": len(texts)}

def fails_later(samples, decode):
    if len(samples) > 2:
        raise ValueError("no such thing")
    return {"n": 1}

def half(samples, decode):
    return {"good": 1, "bad": "one" if len(samples) > 2 else 2, "bad/too": 3.0}

def fails(samples, decode):
    return {"mean": samples[5]}

def text(samples, decode):
    return {"mean": "0.5"}

def number(samples, decode):
    return 0.5

def taken(samples, decode):
    return {"seconds": 0.5}
"""


async def test_each_row_has_the_figures_of_the_samples_that_made_its_version(
    tmp_path: Path, capfd: Any
) -> None:
    (tmp_path / "mine.py").write_text(METRICS)
    async with runs.session(tmp_path) as s:
        for name, mode in (
            ("lengths", "async_partial"),
            ("fails_later", "colocate_sync"),
            ("half", "one_step_off"),
        ):
            key = f"observe.metrics={tmp_path}/mine.py:{name}"
            more = ["async_training.trigger_parameter_sync_step=2"] if name == "lengths" else []
            assert (await runs.run(s, tmp_path / name, key, f"mode={mode}", *more)).complete
    rows = runs.rows(tmp_path / "lengths")
    for row in rows:
        assert row["user/length"] == pytest.approx(row["response_length/mean"])
        assert row["user/score"] == pytest.approx(row["reward/mean"])
        assert row["user/texts"] >= 1 and row["user/errors"] == 0 and row["user/seconds"] > 0
    lines = (tmp_path / "seen.txt").read_text().splitlines()
    trained = [json.loads(line) for line in lines]
    history = (tmp_path / "lengths" / "history.jsonl").read_text().splitlines()
    versions = [found["trained"] for line in history if (found := json.loads(line)).get("trained")]
    assert [sorted(ids) for ids in trained] == versions

    rows = runs.rows(tmp_path / "fails_later")
    assert [row["user/errors"] for row in rows] == [*range(1, len(rows) + 1)]
    assert not any("user/n" in row for row in rows)
    rows = runs.rows(tmp_path / "half")
    assert all(row["user/good"] == 1 and row["user/bad/too"] == 3 for row in rows)
    assert not any("user/bad" in row for row in rows)
    said = " ".join(capfd.readouterr().err.split())
    assert said.count("it raised ValueError: no such thing") == 1
    assert said.count("its 'bad' is 'one', which is no number") == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fails", ["it raised IndexError", "samples[5]"]),
        ("text", ["its 'mean' is '0.5', which is no number"]),
        ("number", ["it returned 0.5, which is no dict"]),
        ("taken", ["'seconds'"]),
        ("missing", ["has no 'missing'"]),
    ],
)
def test_a_function_that_fails_is_refused_before_a_run(
    name: str, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(METRICS)
    key = f"observe.metrics={tmp_path}/mine.py:{name}"
    for dry in ([], ["--dry-run"]):
        done = runs.millrace(*runs.small(tmp_path / "run", key), *dry)
        assert done.code == 2, done.err
        assert all(word in done.err for word in ["observe.metrics = ", *words]), done.err
        assert not (tmp_path / "run").exists()


def test_a_slow_function_is_named_once() -> None:
    notes: list[str] = []
    clock = iter([0.0, 1.5, 2.0, 9.0])

    def slow(samples: Any, decode: Any) -> dict[str, float]:
        return {"a": 1}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millrace.observe.user_metrics.time.perf_counter", lambda: next(clock))
        metrics = UserMetrics("mine.py:slow", slow, str, notes.append, str)
        assert metrics.row(1)["user/seconds"] == 1.5 and metrics.row(2)["user/seconds"] == 7.0
    assert len(notes) == 1 and "mine.py:slow took 1.5 s for version 1" in notes[0]
