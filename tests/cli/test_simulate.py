"""`millrace simulate`: stories, violations and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.faults.mutants import MUTANTS


def test_simulate_tells_the_story_of_one_seed_and_refuses_what_it_cannot_run(
    run: Callable[..., Any],
) -> None:
    code, out, _ = run("simulate", "--faults", "--seeds", "2", "--json")
    found = json.loads(out)
    assert code == 0 and found["complete"] and found["seeds"] == 1 and not found["violations"]
    assert "the run is complete" in found["stories"]["2"][-2]
    code, out, _ = run("simulate", "--faults", "--seeds", "0..3")
    assert code == 0 and out.startswith("4 seeds: 0 with a violation")
    code, out, _ = run("simulate", "--seeds", "2")
    assert code == 0 and "\n1 seed: 0 with a violation" in out, "faults are the default"
    for text in ("9..3", "3..", "0-3", "\u00b2"):
        code, _, err = run("simulate", "--faults", "--seeds", text)
        assert code == 2 and "Fix: " in err


def test_simulate_ends_with_1_and_the_story_of_a_broken_seed(run: Callable[..., Any]) -> None:
    with MUTANTS["stale replica serving"]():
        code, out, _ = run("simulate", "--faults", "--seeds", "0..3")
    assert code == 1 and "I2: " in out and "attempt 1 starts" in out
