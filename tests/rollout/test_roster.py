"""The roster of replicas: every sequence of events leaves it legal, and old news change nothing."""

from __future__ import annotations

import random

import pytest

from millrace.replicas.roster import PRESENT, Change, ReplicaState, Roster

LIVE, LOST, STALE, RETIRED = (
    ReplicaState.LIVE,
    ReplicaState.LOST,
    ReplicaState.STALE,
    ReplicaState.RETIRED,
)
LEFT = ReplicaState.LEFT
LEGAL = {
    (LIVE, LOST),
    (STALE, LOST),
    (LOST, LOST),
    (LOST, STALE),
    (STALE, LIVE),
    *((state, RETIRED) for state in (LIVE, LOST, STALE)),
    *((state, LEFT) for state in (LIVE, LOST, STALE, RETIRED)),
    (LEFT, STALE),
}


@pytest.mark.parametrize("seed", range(40))
def test_any_events_in_any_order_make_legal_moves_alone(seed: int) -> None:
    dice, count, most = random.Random(seed), 3, random.Random(seed).randrange(4)
    roster, changes = Roster(count, max_restarts=most), list[Change]()
    before, row = [LIVE] * count, [0] * count

    def told(change: Change) -> None:
        i = change.replica
        assert (before[i], change.to) in LEGAL and roster.state(i) is change.to
        row[i] += change.to in (LOST, RETIRED)
        row[i] = 0 if change.to is LEFT or before[i] is LEFT else row[i]
        assert (row[i] > most) is (change.to is RETIRED)
        before[i] = change.to
        changes.append(change)

    with roster.subscribe(told):
        for _ in range(60):
            i, age = dice.randrange(count), dice.choice((0, 0, 0, 1))
            state, incarnation, was = roster.state(i), roster.incarnation(i) - age, len(changes)
            match dice.randrange(6):
                case 4 if state is LEFT:
                    assert roster.join(i) == incarnation + age + 1
                case 4:
                    with pytest.raises(ValueError, match=f"is {state}, expected left"):
                        roster.join(i)
                case 5 if state is not LEFT and dice.random() < 0.3:
                    roster.leave(i)
                case 5:
                    continue
                case 0:
                    counts = roster.lose(i, incarnation, "why")
                    assert counts is (state in PRESENT and not age)
                case 1:
                    counts = roster.proven(i, incarnation)
                    assert counts is (state in PRESENT and not age)
                    row[i] = 0 if counts and state is LIVE else row[i]
                case 2 if state is LOST:
                    assert roster.restarted(i) == incarnation + age + 1
                case 3 if state is LOST:
                    roster.start_failed(i, "why")
                case 2:
                    with pytest.raises(ValueError, match=f"is {state}, expected lost"):
                        roster.restarted(i)
                case _:
                    with pytest.raises(ValueError, match=f"is {state}, expected lost"):
                        roster.start_failed(i, "why")
            if age:
                assert len(changes) == was or state is LOST or changes[-1].to in (LEFT, STALE)
            assert [*roster.present] == [k for k in range(count) if before[k] in PRESENT]
            assert roster.starved is (LIVE not in before and STALE in before)
            assert roster.over is (set(before) <= {RETIRED, LEFT})
            away = [k for k in range(count) if before[k] is not LIVE]
            assert all(f"rollout-{k} is {before[k]}" in roster.describe() for k in away)
    assert not roster._listeners


def test_the_back_off_doubles_and_begins_again_once_a_version_was_served() -> None:
    roster, waits = Roster(1, max_restarts=9), []
    for _ in range(8):
        roster.lose(0, roster.incarnation(0), "why")
        waits.append(roster.backoff_s(0))
        roster.restarted(0)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    roster.proven(0, 8)
    roster.lose(0, 8, "why")
    assert roster.backoff_s(0) == 60, "it never served a whole version"
    for _ in range(2):
        roster.proven(0, roster.restarted(0) if roster.state(0) is LOST else 9)
    roster.lose(0, 9, "why")
    assert roster.backoff_s(0) == 1


def test_a_replica_joins_with_the_next_number_or_with_the_one_that_left() -> None:
    roster, changes = Roster(1), list[Change]()
    with roster.subscribe(changes.append):
        assert roster.join(1) == 0 and roster.present == {0: 0, 1: 0} and roster.live == [0]
        assert roster.proven(1, 0) and roster.live == [0, 1]
        roster.leave(0)
        assert not roster.lose(0, 0, "its process ended") and not roster.proven(0, 0)
        assert roster.join(0) == 1
    assert [(c.replica, c.to) for c in changes] == [(1, STALE), (1, LIVE), (0, LEFT), (0, STALE)]
    assert (roster.joined, roster.left, roster.losses) == (2, 1, 0)
