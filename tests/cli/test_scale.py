"""`millrace scale`: what it refuses before it asks a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.report.folders import Run


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("2", "rollout=N = '2': must be of the form rollout=N. Fix: rollout=2."),
        ("rollout", "rollout=N = 'rollout': must be of the form rollout=N. Fix: rollout=2."),
        ("rollout=two", "rollout = 'two': must be an integer from 1 to 9999. Fix: rollout=2."),
        ("rollout=99999", "rollout = '99999': must be an integer from 1 to 9999. Fix: rollout=2."),
        ("trainer=2", "only the replicas of a running run can change. Fix: rollout=2."),
        ("rollout=2", "RUN = 'nowhere': no such folder"),
    ],
)
def test_a_wrong_word_is_refused_with_the_right_one(
    run: Callable[..., Any], change: str, said: str
) -> None:
    code, out, err = run("scale", "nowhere", change)
    assert (code, out) == (2, "") and said in err


def test_a_run_without_a_driver_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    made = Run(tmp_path / "made")
    code, _, err = run("scale", str(made.path), "rollout=2")
    assert code == 2 and "the run does not run. Fix: the folder of a running run." in err
    (made.path / "history.jsonl").unlink()
    code, _, err = run("scale", str(made.path), "rollout=2")
    assert code == 2 and "has not started its workers yet" in err
    made.close()
