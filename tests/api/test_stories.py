"""Scripts of users. One runs as a user runs it: `python script.py` in a folder of its own.

The others run in this process: a new one would only import everything once more.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ROOT, last_json

HERE = Path(__file__).parent


def story(name: str, folder: Path) -> dict[str, Any]:
    """Run a script, and return the object that it prints last."""
    script, output = str(HERE / "stories" / f"{name}.py"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.chdir(folder)
        patch.setenv("MILLRACE_CACHE", str(folder / "cache"))
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "argv", [script, str(HERE)])
        runpy.run_path(script, run_name="__main__")
    return last_json(output.getvalue())


def test_closures_score_choose_and_measure_rows_of_a_list(tmp_path: Path) -> None:
    found = story("closure", tmp_path)
    assert found["complete"] and found["versions"] == [1, 2, 3, 4] and found["scores"] == 128
    assert found["checkpoint"].endswith("version-000004")
    assert "val/val/mean@1" in found["after"]
    assert {"1000", "1001", "1002"} <= {*found["prompts"]} and found["counted"] == 32
    (rows,) = (tmp_path / "cache" / "given").glob("*/train.jsonl")
    assert json.loads(rows.read_text().splitlines()[0])["place"] == 1000


def test_a_dataset_in_memory_and_a_function_of_the_script(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MILLRACE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(HERE / "stories" / "dataset.py"), str(HERE)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = last_json(done.stdout)
    assert found["complete"] and found["elsewhere"] >= 1 and found["truths"] == []
    assert found["spec"].endswith("stories/dataset.py:reward")


def test_an_agent_plays(tmp_path: Path) -> None:
    found = story("agent", tmp_path)
    assert found["complete"] and found["played"]
    assert found["rewards"] == [5.0] and found["turns"] == 2


def test_a_callback_sets_the_rate_and_stops_and_a_resume_keeps_the_rate(tmp_path: Path) -> None:
    found = story("stops", tmp_path)
    assert found["seen"] == [[1, 5e-4, 16, 5e-4], [2, 1e-4, 16, 1e-4], [3, 1e-4, 16, 1e-4]]
    assert not found["stopped"] and found["checkpoint"].endswith("3") and found["complete"]
    assert found["rates"] == [5e-4] + 7 * [1e-4]
