"""Every hang of other systems has its culprit named, and a run that moves raises no alarm."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from millrace.extras.faults.scenario import Fault, Trigger
from tests.why.enact import MOST_S, Hung, enact, never, scenario
from tests.why.hangs import HANGS, Hang, at, run


@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.thread)
def test_the_culprit_of_a_hang_is_named(hang: Hang) -> None:
    verdict = run(hang)
    assert fnmatchcase(verdict.culprit, hang.culprit), verdict.sentence
    assert hang.says in verdict.sentence
    assert verdict.next and verdict.chain


@pytest.mark.parametrize("mode", ["async_partial", "colocate_sync"])
def test_a_restart_that_does_not_end_is_named(mode: str) -> None:
    """All replicas are lost, and no other worker starts. The failover itself stands still."""

    def die(attempt: Hung) -> None:
        attempt.start = never  # type: ignore[method-assign]
        for name in ("rollout-0", "rollout-1"):
            attempt.fired.append(Fault("replica_dies", 0, Trigger("time", 2.0), name))
            attempt.workers[name].kill()

    verdict = enact(scenario(mode), at(2, die), MOST_S)[-1]
    assert verdict.state == "still" and verdict.culprit.startswith("restart of rollout-")
    assert "has been in the start of a worker" in verdict.sentence, verdict.sentence


@pytest.mark.parametrize("mode", ["async_partial", "colocate_sync"])
def test_a_recovery_of_the_trainer_that_does_not_end_is_named(mode: str) -> None:
    def die(attempt: Hung) -> None:
        attempt.start_ranks = never  # type: ignore[method-assign]
        attempt.workers["trainer-1"].kill()

    verdict = enact(scenario(mode), at(2, die), MOST_S)[-1]
    assert verdict.state == "still" and verdict.culprit == "recovery of the trainer"
    assert "has been in the start of the ranks" in verdict.sentence, verdict.sentence
