"""The account of devices, from events that simulated runs do not have."""

from __future__ import annotations

from typing import Any

from millrace.report.accounts.devices import DeviceAccount
from millrace.report.accounts.flow import FlowAccount
from millrace.schedule.schedule import Schedule
from millrace.waits.stream import Event


def test_a_wait_that_is_relabelled_by_more_than_it_lasted_keeps_the_sum() -> None:
    """A wait is measured a little before and after its events."""
    account = DeviceAccount(
        0.0,
        Schedule(ppo_mini_batch_size=1),
        FlowAccount(0.0),
        trainers=1,
        replicas={"rollout-0": 1},
    )
    for time, name in ((1.0, "wait_samples"), (1.5, "train")):
        account(Event(time, "trainer", name, "state"))
    facts = {"seconds": 0.5 + 1e-6, "source": "wait_samples", "target": "wait_prev_gen"}
    account(Event(1.5, "trainer", "relabelled", "at", "", facts))
    seconds = account.seconds(2.0)["trainer"][1]
    assert seconds == {"other": 1.0, "wait_prev_gen": 0.5, "train_other": 0.5}


def test_an_idle_replica_waits_for_teachers_once_the_scores_are_there() -> None:
    """The ledger is full. A response is scored for a second, and a teacher reads it for three."""
    flow = FlowAccount(0.0)
    schedule = Schedule(ppo_mini_batch_size=1)
    account = DeviceAccount(0.0, schedule, flow, trainers=1, replicas={"rollout-0": 1})
    for time, track, name, phase in (
        (0.0, "samples", "running", "at"),
        (0.0, "rewards", "score", "begin"),
        (0.0, "teachers", "log_probs", "begin"),
        (1.0, "rewards", "score", "end"),
        (3.0, "teachers", "log_probs", "end"),
    ):
        event = Event(time, track, name, phase, "0")  # type: ignore[arg-type]
        flow(event)
        account(event)
    seconds = dict(account.seconds(4.0)["rollout-0"][1])
    assert seconds == {"wait_rewards": 2.0, "wait_teachers": 2.0}


def test_an_idle_replica_waits_for_tools_only_if_sessions_have_any() -> None:
    """The ledger is full. A session draws for a second, waits for two, and is scored for four."""

    def waits(*, tools: bool) -> dict[str, float]:
        flow = FlowAccount(0.0)
        schedule = Schedule(ppo_mini_batch_size=1)
        account = DeviceAccount(
            0.0, schedule, flow, trainers=1, replicas={"rollout-0": 1}, tools=tools
        )
        for time, track, name, phase in (
            (0.0, "samples", "running", "at"),
            (0.0, "rollout-0", "request", "begin"),
            (1.0, "rollout-0", "request", "end"),
            (3.0, "rewards", "score", "begin"),
            (7.0, "rewards", "score", "end"),
        ):
            event = Event(time, track, name, phase, "0" if track == "samples" else "0/0")  # type: ignore[arg-type]
            flow(event)
            account(event)
        return dict(account.seconds(7.0)["rollout-0"][1])

    assert waits(tools=True) == {"generate": 1.0, "wait_tools": 2.0, "wait_rewards": 4.0}
    assert waits(tools=False) == {"generate": 1.0, "wait_rewards": 6.0}


def test_the_seconds_of_a_replica_count_from_its_join_until_it_leaves() -> None:
    flow, schedule = FlowAccount(0.0), Schedule(ppo_mini_batch_size=1)
    account = DeviceAccount(0.0, schedule, flow, trainers=1, replicas={"rollout-0": 2})
    for time, track, name, phase in (
        (0.0, "rollout-0", "request", "begin"),
        (3.0, "rollout-1", "replica_stale", "at"),
        (4.0, "rollout-1", "request", "begin"),
        (6.0, "rollout-1", "request", "end"),
        (7.0, "rollout-1", "replica_left", "at"),
        (9.0, "rollout-1", "replica_stale", "at"),
        (10.0, "rollout-0", "replica_stale", "at"),
        (10.0, "rollout-3", "replica_left", "at"),
        (11.0, "rollout-2", "request", "begin"),
    ):
        account(Event(time, track, name, phase, "0/0"))  # type: ignore[arg-type]
    found: dict[str, Any] = {
        track: (n, dict(seconds)) for track, (n, seconds) in account.seconds(12.0).items()
    }
    assert found["rollout-0"] == (2, {"generate": 12.0})
    assert found["rollout-1"] == (2, {"generate": 2.0, "other": 5.0})
    assert found["rollout-2"] == (2, {"generate": 1.0}), "it joined before the watch"
    assert "rollout-3" not in found


def test_each_change_of_a_state_is_told_and_the_states_of_now_can_be_asked_for() -> None:
    """So a trace can begin, and go on after a gap."""
    flow, told = FlowAccount(0.0), list[tuple[float, str, str]]()
    schedule = Schedule(ppo_mini_batch_size=1, staleness_threshold=1.0)
    account = DeviceAccount(0.0, schedule, flow, trainers=1, replicas={"rollout-0": 1})
    account.tell(0.5, lambda e: told.append((e.time, e.track, e.name)))
    begun = [(0.5, "trainer", "other"), (0.5, "rollout-0", "idle"), (0.5, "rollouts", "other")]
    assert told == begun
    told.clear()
    for time, track, name, phase in (
        (1.0, "rollout-0", "request", "begin"),
        (1.5, "rollout-0", "request", "begin"),
        (2.0, "rollout-1", "replica_stale", "at"),
        (3.0, "rollout-0", "request", "end"),
        (4.0, "rollout-0", "request", "end"),
        (5.0, "rollouts", "pause", "begin"),
        (6.0, "rollout-1", "replica_left", "at"),
        (7.0, "rollout-0", "request", "begin"),
    ):
        account(Event(time, track, name, phase, "0/0"))  # type: ignore[arg-type]
    assert told == [
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
    flow = FlowAccount(0.0)
    schedule = Schedule(ppo_mini_batch_size=1)
    account = DeviceAccount(0.0, schedule, flow, trainers=1, replicas={"rollout-0": 1})
    for time, track, name, phase, key in (
        (0.0, "samples", "running", "at", "0"),
        (0.0, "rollout-0", "request", "begin", "0/0"),
        (5.0, "rollout-0", "replica_lost", "at", ""),
        (5.0, "rollout-0", "request", "end", "0/0"),
        (60.0, "rollout-0", "replica_stale", "at", ""),
        (61.0, "rollout-0", "replica_live", "at", ""),
        (61.0, "rollout-0", "request", "begin", "0/0"),
    ):
        event = Event(time, track, name, phase, key)  # type: ignore[arg-type]
        flow(event)
        account(event)
    assert account.seconds(62.0)["rollout-0"][1] == {"generate": 6.0, "other": 56.0}
