"""A sampler in a file of the user's: a failure, a resume that equals one run, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from safetensors.torch import load_file

from millrace.data.curriculum import FILE, Outcomes
from millrace.data.rows import Problem
from millrace.data.user_code import load
from tests.e2e import runs

SAMPLER = """
import random
from zlib import crc32

def by_the_past(i, rows, outcomes):
    return crc32(outcomes.rows.tobytes() + outcomes.scores.tobytes(), i) % 50

def other(i, rows, outcomes):
    return 0

def drawn(i, rows, outcomes):
    return random.randrange(len(rows))

def past_the_end(i, rows, outcomes):
    return len(rows) - 5 + i
"""
BROKEN = SAMPLER.replace("return crc32", "assert i < 20; return crc32")


def keys(folder: Path, file: Path, name: str = "by_the_past") -> list[str]:
    return [
        *runs.small(folder, f"data.sampler={file}:{name}", "rollout.total_rollout_steps=32"),
        *("trainer.deterministic=true", "trainer.save_freq=1", "mode=on_policy_pipeline"),
        *("sft.steps=20", "report.enable=false"),
    ]


def test_a_run_that_ended_at_an_error_resumes_as_if_there_was_none(tmp_path: Path) -> None:
    whole, parts, file = tmp_path / "whole", tmp_path / "parts", tmp_path / "mine.py"
    file.write_text(SAMPLER)
    assert runs.millrace(*keys(whole, file)).code == 0
    file.write_text(BROKEN)
    failed = runs.millrace(*keys(parts, file))
    assert failed.code != 0
    wanted = ("data.sampler = ", "mine.py:by_the_past", "for prompt 20 it raised AssertionError")
    assert all(text in failed.err for text in wanted) and "Traceback" not in failed.err
    file.write_text(SAMPLER)
    resumed = runs.millrace(*keys(parts, file), "trainer.resume=auto")
    assert resumed.code == 0, resumed.err
    last = [max((folder / "checkpoints").glob("version-*")) for folder in (whole, parts)]
    assert last[0].name == last[1].name
    assert (last[0] / FILE).read_bytes() == (last[1] / FILE).read_bytes()
    for k, checkpoint in enumerate(last):
        assert runs.millrace("export", str(checkpoint), str(tmp_path / f"model{k}")).code == 0
    a, b = (load_file(tmp_path / f"model{k}" / "model.safetensors") for k in range(2))
    assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)
    found = runs.audit(parts)
    assert found["trained"] == 32 and found["lost"] == found["trained_twice"] == 0
    assert all(row["data/sampler_s"] > 0 for row in runs.rows(parts))

    refused = runs.millrace(*keys(parts, file, "other"), "trainer.resume=auto")
    assert refused.code == 2 and "it decided the rows" in refused.err, refused.err
    file.unlink()
    assert (
        runs.millrace(
            "eval",
            "quickstart",
            f"trainer.resume={last[1]}",
            f"model.path={tmp_path}/model0",
            f"data.sampler={file}:by_the_past",
            f"trainer.run_dir={tmp_path / 'eval'}",
        ).code
        == 0
    )


def test_the_example_gives_longer_problems_to_a_policy_that_solves_the_recent_ones() -> None:
    spec = f"{runs.ROOT}/examples/algorithms/curriculum.py:curriculum"
    choose = load("data.sampler", spec)
    rows = [Problem("1" * (1 + i * 7 % 8), "sums") for i in range(800)]

    def lengths(score: float) -> list[int]:
        past = Outcomes(numpy.zeros(300, "<i8"), numpy.full(300, score))
        picked = [choose(300 + i, rows, past) for i in range(100)]
        assert len(set(picked)) == 100
        return [len(rows[row].text) for row in picked]

    assert {*lengths(0.0)} == {1} and {*lengths(0.5)} == {5} and {*lengths(1.0)} == {8}
    assert {*lengths(float("nan"))} == {1}
    assert runs.millrace("train", "quickstart", f"data.sampler={spec}", "--dry-run").code == 0


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("drawn", [], ["two calls for prompt 0"]),
        ("past_the_end", [], ["for prompt 5 it returned row", "from 0 to"]),
        ("missing", [], ["has no 'missing'"]),
        ("other", ["data.shuffle=false"], ["data.shuffle = False", "does not read it"]),
    ],
)
def test_a_sampler_is_refused_before_a_model_loads(
    name: str, more: list[str], words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(SAMPLER)
    for dry in ([], ["--dry-run"]):
        done = runs.millrace(*keys(tmp_path / "run", tmp_path / "mine.py", name), *more, *dry)
        assert done.code == 2 and all(word in done.err for word in words), done.err
        assert not (tmp_path / "run").exists()
