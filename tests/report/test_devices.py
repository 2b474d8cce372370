"""The account of devices, from events that simulated runs do not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millrace.report.accounts import DeviceAccount, FlowAccount
from millrace.schedule.schedule import Schedule
from millrace.waits.registry import Event


def account_of(
    moves: Sequence[tuple[Any, ...]],
    *,
    devices: int = 1,
    staleness: float = 0.0,
    tools: bool = False,
) -> tuple[DeviceAccount, list[tuple[float, str, str]]]:
    """Return the account of one replica after events, and each state that it has reported.

    A move has the time, track, name and phase of an event, and its key.
    """
    flow, shown = FlowAccount(0.0), list[tuple[float, str, str]]()
    schedule = Schedule(ppo_mini_batch_size=1, staleness_threshold=staleness)
    account = DeviceAccount(
        0.0, schedule, flow, trainers=1, replicas={"rollout-0": devices}, tools=tools
    )
    account.tell(0.5, lambda e: shown.append((e.time, e.track, e.name)))
    for time, track, name, phase, *key in moves:
        event = Event(time, track, name, phase, *(key or ["0/0"]))
        flow(event)
        account(event)
    return account, shown


def seconds(account: DeviceAccount, now: float, track: str = "rollout-0") -> dict[str, float]:
    return dict(account.seconds(now)[track][1])


def test_a_wait_that_is_relabelled_by_more_than_it_lasted_keeps_the_sum() -> None:
    """A wait is measured a little before and after its events."""
    states = (1.0, "trainer", "wait_samples", "state"), (1.5, "trainer", "train", "state")
    account, _ = account_of(states)
    facts = {"seconds": 0.5 + 1e-6, "source": "wait_samples", "target": "wait_prev_gen"}
    account(Event(1.5, "trainer", "relabelled", "at", "", facts))
    expected = {"other": 1.0, "wait_prev_gen": 0.5, "train_other": 0.5}
    assert seconds(account, 2.0, "trainer") == expected


def test_an_idle_replica_waits_for_teachers_once_the_scores_are_there() -> None:
    """The ledger is full. A response is scored for a second, and a teacher reads it for three."""
    moves = (
        (0.0, "samples", "running", "at", "0"),
        (0.0, "rewards", "score", "begin", "0"),
        (0.0, "teachers", "log_probs", "begin", "0"),
        (1.0, "rewards", "score", "end", "0"),
        (3.0, "teachers", "log_probs", "end", "0"),
    )
    account, _ = account_of(moves)
    assert seconds(account, 4.0) == {"wait_rewards": 2.0, "wait_teachers": 2.0}


def test_an_idle_replica_waits_for_tools_only_if_sessions_have_any() -> None:
    """The ledger is full. A session draws for a second, waits for two, and is scored for four."""
    moves = (
        (0.0, "samples", "running", "at", "0"),
        (0.0, "rollout-0", "request", "begin"),
        (1.0, "rollout-0", "request", "end"),
        (3.0, "rewards", "score", "begin"),
        (7.0, "rewards", "score", "end"),
    )
    with_tools, without = (seconds(account_of(moves, tools=t)[0], 7.0) for t in (True, False))
    assert with_tools == {"generate": 1.0, "wait_tools": 2.0, "wait_rewards": 4.0}
    assert without == {"generate": 1.0, "wait_rewards": 6.0}


def test_the_seconds_of_a_replica_count_from_its_join_until_it_leaves() -> None:
    moves = (
        (0.0, "rollout-0", "request", "begin"),
        (3.0, "rollout-1", "replica_stale", "at"),
        (4.0, "rollout-1", "request", "begin"),
        (6.0, "rollout-1", "request", "end"),
        (7.0, "rollout-1", "replica_left", "at"),
        (9.0, "rollout-1", "replica_stale", "at"),
        (10.0, "rollout-0", "replica_stale", "at"),
        (10.0, "rollout-3", "replica_left", "at"),
        (11.0, "rollout-2", "request", "begin"),
    )
    tracks = account_of(moves, devices=2)[0].seconds(12.0).items()
    found: dict[str, Any] = {track: (n, dict(spent)) for track, (n, spent) in tracks}
    assert found["rollout-0"] == (2, {"generate": 12.0})
    assert found["rollout-1"] == (2, {"generate": 2.0, "other": 5.0})
    assert found["rollout-2"] == (2, {"generate": 1.0}), "it joined before the watch"
    assert "rollout-3" not in found


def test_each_change_of_a_state_is_told_and_the_states_of_now_can_be_asked_for() -> None:
    """So a trace can begin, and go on after a gap."""
    moves = (
        (1.0, "rollout-0", "request", "begin"),
        (1.5, "rollout-0", "request", "begin"),
        (2.0, "rollout-1", "replica_stale", "at"),
        (3.0, "rollout-0", "request", "end"),
        (4.0, "rollout-0", "request", "end"),
        (5.0, "rollouts", "pause", "begin"),
        (6.0, "rollout-1", "replica_left", "at"),
        (7.0, "rollout-0", "request", "begin"),
    )
    account, shown = account_of(moves, staleness=1.0)
    assert shown == [
        (0.5, "trainer", "other"),
        (0.5, "rollout-0", "idle"),
        (0.5, "rollouts", "other"),
        (1.0, "rollout-0", "generate"),
        (1.0, "rollouts", "none_idle"),
        (2.0, "rollout-1", "idle"),
        (2.0, "rollouts", "other"),
        (4.0, "rollout-0", "idle"),
        (5.0, "rollouts", "sync"),
        (6.0, "rollout-1", "left"),
        (7.0, "rollout-0", "generate"),
        (7.0, "rollouts", "none_idle"),
    ]
    now = [(e.track, e.name) for e in account.states(8.0)]
    assert now == [("trainer", "other"), ("rollout-0", "generate"), ("rollouts", "none_idle")]


def test_no_replica_waits_for_rewards_while_all_are_lost() -> None:
    moves = (
        (0.0, "samples", "running", "at", "0"),
        (0.0, "rollout-0", "request", "begin"),
        (5.0, "rollout-0", "replica_lost", "at", ""),
        (5.0, "rollout-0", "request", "end"),
        (60.0, "rollout-0", "replica_stale", "at", ""),
        (61.0, "rollout-0", "replica_live", "at", ""),
        (61.0, "rollout-0", "request", "begin"),
    )
    assert seconds(account_of(moves)[0], 62.0) == {"generate": 6.0, "other": 56.0}
