"""`millrace scale`: what it refuses before it asks a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("2", "rollout=N = '2': must be of the form rollout=N. Fix: rollout=2."),
        ("rollout", "rollout=N = 'rollout': must be of the form rollout=N. Fix: rollout=2."),
        ("rollout=two", "rollout = 'two': must be an integer from 1 on. Fix: rollout=2."),
        ("trainer=2", "only the replicas of a running run can change. Fix: rollout=2."),
        ("rollout=2", "RUN = 'nowhere': is not a run folder. Fix: "),
    ],
)
def test_a_wrong_word_is_refused_with_the_right_one(
    run: Callable[..., Any], change: str, said: str
) -> None:
    code, out, err = run("scale", "nowhere", change)
    assert (code, out) == (2, "") and said in err
