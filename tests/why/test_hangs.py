"""Every hang of other systems has its culprit named, and a run that moves raises no alarm."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from tests.why.hangs import HANGS, Hang, run


@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.thread)
def test_the_culprit_of_a_hang_is_named(hang: Hang) -> None:
    verdict = run(hang)
    assert fnmatchcase(verdict.culprit, hang.culprit), verdict.sentence
    assert hang.says in verdict.sentence
    assert verdict.next and verdict.chain
