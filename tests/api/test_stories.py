"""Scripts of users, each run as a user runs it: `python script.py` in a folder of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.runs import ROOT

HERE = Path(__file__).parent


def story(name: str, folder: Path) -> dict[str, Any]:
    """Run a script, and return the object that it prints last."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MILLRACE_CACHE": str(folder / "cache")}
    command = [sys.executable, str(HERE / "stories" / f"{name}.py"), str(HERE)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_closures_score_choose_and_measure_rows_of_a_list(tmp_path: Path) -> None:
    found = story("closure", tmp_path)
    assert found["complete"] and found["versions"] == [1, 2, 3, 4] and found["scores"] == 128
    assert found["checkpoint"].endswith("version-000004")
    assert "val/val/mean@1" in found["after"]
    assert {"1000", "1001", "1002"} <= {*found["prompts"]} and found["counted"] == 32
    (rows,) = (tmp_path / "cache" / "given").glob("*/train.jsonl")
    assert json.loads(rows.read_text().splitlines()[0])["place"] == 1000


def test_a_dataset_in_memory_and_a_function_of_the_script(tmp_path: Path) -> None:
    found = story("dataset", tmp_path)
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
