"""What a trace says of times in which it lost events."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from millrace.report.accounts.devices import DeviceAccount
from millrace.report.accounts.flow import FlowAccount
from millrace.report.trace.spans import read
from millrace.report.trace.writer import TraceWriter
from millrace.schedule.schedule import Schedule
from tests.report.runs import Clock, Watch


@pytest.mark.parametrize("to_the_end", [False, True])
def test_a_state_ends_where_the_trace_lost_events(tmp_path: Path, to_the_end: bool) -> None:
    clock, released = Clock(0.0), threading.Event()

    class Held(TraceWriter):
        def _work(self) -> None:
            released.wait()
            super()._work()

    writer = Held(tmp_path, 1, clock, lambda note: None, most_events=2)
    watch = Watch(clock, [writer])
    for clock.now, state in ((0.0, "idle"), (1.0, "generate"), (2.0, "idle")):
        watch.state("rollout-0", state)  # the queue has no place for the last one
    released.set()
    while writer._events:
        time.sleep(0.001)
    if not to_the_end:
        clock.now = 100.0
        watch.state("rollout-0", "generate")
    clock.now = 101.0
    writer.close()
    found = [(s.name, s.start, s.end) for s in read(tmp_path) if s.track in ("run", "rollout-0")]
    assert found[:3] == [("idle", 0.0, 1.0), ("generate", 1.0, 2.0), ("gap", 2.0, 2.0)]
    assert found[3:] == ([] if to_the_end else [("generate", 100.0, 101.0)])


def test_a_trace_that_has_ended_keeps_no_states(tmp_path: Path) -> None:
    notes, replicas = list[str](), {"rollout-0": 1}
    account = DeviceAccount(
        0.0, Schedule(ppo_mini_batch_size=1), FlowAccount(0.0), trainers=1, replicas=replicas
    )
    writer = TraceWriter(
        *(tmp_path, 1, lambda: 0.0, notes.append),
        limit_mb=0,
        every_s=0.01,
        most_events=100,
        states=account.states,  # type: ignore[arg-type]
    )
    account.tell(0.0, writer.put)
    while not writer._ended:
        time.sleep(0.01)
    watch = Watch(lambda: 0.0, [account, writer])
    for i in range(200):
        with watch.span("rollout-0", "request", f"{i}/0"):
            pass
    assert not writer._events
    writer.close()
    assert len(notes) == 1 and "report.trace_mb" in notes[0]
