"""Every hang of other systems has its culprit named, and a run that moves raises no alarm."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

from millrace.extras.faults.scenario import Fault, Trigger
from millrace.schedule.modes import MODES
from millrace.waits.answer import ProcessStatus
from millrace.waits.verdict import MOST_FILES, StallWatch, Verdict, save
from tests.why import enact as enacting
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


STALL_S = 300.0
"""The default of trainer.stall_s."""


def alarms_of(verdicts: list[Verdict], look_s: float) -> list[tuple[float, str]]:
    """Return when a StallWatch raises the alarm on these looks, and on whom."""
    found: list[tuple[float, str]] = []
    k = 0
    watch = StallWatch(
        STALL_S,
        lambda: verdicts[k].answers,
        lambda verdict: found.append((k * look_s, verdict.culprit)),
    )
    for k, verdict in enumerate(verdicts):
        watch.look(k * look_s, verdict.answers[0].still_s)
    return found


def test_a_quiet_hour_raises_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token takes 3 s, and a step some minutes: the run is slow for an hour and moves."""
    monkeypatch.setattr(enacting, "SEEN_S", STALL_S)
    made = scenario("async_partial", validates=True)
    slow = replace(made.cost, token_s=3.0, train_token_s=0.5, transfer_s=15.0, reward_s=45.0)
    keys = {"wait_deadline_s": 1e5}
    trainer = made.config.trainer.model_copy(update=keys)
    made = replace(
        made, cost=slow, write_s=200.0, config=made.config.model_copy(update={"trainer": trainer})
    )
    monkeypatch.setattr("millrace.extras.faults.attempt.DEADLINE_S", 1e5)
    verdicts = enact(made, lambda attempt: None, 3600.0, look_s=10.0)
    assert len(verdicts) >= 360 and {v.state for v in verdicts} == {"moving"}
    assert alarms_of(verdicts, 10.0) == []
    moved = [v.answers[0].progress.get("moves", (0, 0))[0] for v in verdicts]
    assert moved[-1] > moved[0], "the hour was not quiet but dead"


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_moves_is_never_said_to_stand_still(mode: str) -> None:
    verdicts = enact(scenario(mode, validates=True), lambda attempt: None, 30.0, look_s=0.5)
    assert verdicts and {v.state for v in verdicts} == {"moving"}
    assert any("The trainer has waited" in v.sentence for v in verdicts)


def test_the_alarm_comes_once_and_then_ever_more_rarely() -> None:
    """And not while a worker moves, although the driver's counters stand still."""
    worker = ProcessStatus("rollout-0", 1, progress={"tokens": (1.0, 0.0)})
    times: list[int] = []
    now = 0

    def ask() -> list[ProcessStatus]:
        still = 0.0 if now < 1000 else now - 1000.0
        worker.progress["tokens"] = (1.0, still)
        return [ProcessStatus("driver", 0, progress={"moves": (3.0, float(now))}), worker]

    watch = StallWatch(STALL_S, ask, lambda verdict: times.append(now))
    for now in range(1, 6000):
        watch.look(float(now), float(now))
    assert times == [1300, 1900, 3100, 5500]


def test_only_some_stalls_are_saved(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    for k in range(MOST_FILES):
        (folder / f"stall-{k}.txt").touch()
    assert save(Verdict("still", "x"), folder) is None
    (folder / "stall-0.txt").unlink()
    saved = save(Verdict("still", "trainer rank 3 has been in it"), folder)
    assert saved is not None and "trainer rank 3" in saved.read_text()
    assert saved.with_suffix(".json").stat().st_size


def test_thirty_threads_are_enacted() -> None:
    names = [hang.thread for hang in HANGS]
    assert len(set(names)) == len(names) >= 25
