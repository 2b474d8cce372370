"""The benchmark of a governed staleness: it admits what it chose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e import runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the rows of one shape by arm."""
    script = runs.ROOT / "benchmarks" / "governed.py"
    out = tmp_path_factory.mktemp("governed") / "rows.jsonl"
    command = [sys.executable, str(script), "rates", "--shapes", "SmolLM2", "--versions", "12"]
    env = {**os.environ, "PYTHONPATH": str(runs.ROOT)}
    subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, env=env)
    return {row["arm"]: row for row in map(json.loads, out.read_text().splitlines())}


def test_more_staleness_is_faster_where_the_trainer_waits(arms: dict[str, dict[str, Any]]) -> None:
    rates = [arms[arm]["rate"] for arm in ("0", "0.5", "1", "2")]
    assert rates == sorted(rates) and rates[-1] > 1.3 * rates[0]


def test_a_governor_admits_what_it_chose_and_keeps_its_ceiling(
    arms: dict[str, dict[str, Any]],
) -> None:
    curve = arms["auto"]["curve"]
    first = {arm: arms[arm]["curve"][0]["seconds"] for arm in ("auto", "0.5", "2")}
    assert first["auto"] == first["0.5"] < first["2"], "it begins with 0.5, under a ceiling of 2"
    chosen = [point["auto"] for point in curve]
    assert chosen[-1] > 0.5 and max(chosen) <= 2.0, "the trainer waits, so it chooses more"
    assert curve[-1]["staleness/mean"] > arms["0.5"]["curve"][-1]["staleness/mean"]
