"""A trace with some samples only, or with a gap.

Each sample is drawn whole or not at all, the times of devices stay exact, and the load decides.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.persist.run_reader import RunReader
from millrace.report.accounts import DeviceAccount, FlowAccount
from millrace.report.page.curves import lengths
from millrace.report.page.timeline import columns, lanes, timeline
from millrace.report.query import query
from millrace.report.trace import writer as writing
from millrace.report.trace.chrome import GAP, Line, Translator
from millrace.report.trace.spans import Span, read
from millrace.report.trace.writer import SampleChoice, TraceWriter
from millrace.schedule.schedule import Placement, Schedule
from millrace.waits.registry import Event
from tests.report.runs import Clock, Run, Watch, life

Call = tuple[str, str, str, float, float]
"""Track, name, key, begin and end in milliseconds."""

PLACES = (
    *(("rollout-0", "request", f"{i}/{j}") for i in range(6) for j in range(2)),
    *(("rollout-1", "request", f"{i}/0") for i in range(6)),
    *(("rollout-0", "request", f"val/{i}") for i in range(3)),
    *(("rewards", "score", str(i)) for i in range(6)),
    ("rewards", "score", "val/1"),
)


def of_calls(calls: Sequence[Call]) -> list[Event]:
    """Return the events of the calls in the order of their times, a begin before an end."""
    events = [
        (at / 1000, phase, track, name, key)
        for track, name, key, begin, end in calls
        for phase, at in (("begin", begin), ("end", end))
    ]
    events.sort(key=lambda e: (e[0], e[1]))
    return [Event(t, track, name, phase, key, {}) for t, phase, track, name, key in events]  # type: ignore[arg-type]


def draw(events: Sequence[Event], thin: dict[int, int] | None = None, batch: int = 5) -> list[Line]:
    """Return the lines of events. `thin` has the new number of each batch that changes it."""
    translator, queue = Translator(0.0), list[Event]()
    choice, end = SampleChoice(), events[-1].time if events else 0.0
    for i, event in enumerate(events):
        if thin and i % batch == 0 and i // batch in thin:
            choice.draw(thin[i // batch])
        if choice.calls_for(event.phase, event.key):
            queue.append(event)
        if i % batch == 0:
            while queue:
                translator.add(queue.pop(0))
            translator.write_begun(event.time)
    for event in queue:
        translator.add(event)
    translator.end_all(end, GAP)
    return translator.take()


def slices(out: Sequence[Line]) -> list[tuple[str, str, str, float, float, dict[str, Any]]]:
    """Return track, kind, name, begin, end (in ms) and facts of each slice."""
    import msgspec

    tracks, begun, found = dict[int, str](), dict[int, Line](), []
    for line in out:
        facts = msgspec.json.decode(bytes(line.args)) if line.args else {}
        if line.name == "process_name":
            tracks[line.pid] = facts["name"]
        elif line.ph == "B":
            assert line.tid not in begun, "a lane has one slice at a time"
            begun[line.tid] = line
        elif line.ph in "XE":
            first = begun.pop(line.tid) if line.ph == "E" else line
            end = line.ts + (line.dur or 0.0)
            assert end >= first.ts
            found.append(
                (tracks[line.pid], first.cat, first.name, first.ts / 1000, end / 1000, facts)
            )
    assert not begun
    return found


CALLS = st.lists(
    st.tuples(
        st.sampled_from(PLACES),
        st.integers(0, 400).map(lambda t: t / 4),
        st.integers(1, 60).map(lambda t: t / 4),
    ).map(lambda c: (*c[0], c[1], c[1] + c[2])),
    max_size=40,
)


@given(CALLS, st.sampled_from([1, 2, 4]))
def test_all_calls_of_a_sample_are_drawn_or_none(calls: list[Call], every: int) -> None:
    events, drawn, whole = of_calls(calls), Counter[str](), Counter[str]()
    for s in slices(draw(events, {0: every} if events else None)):
        if s[1] in ("request", "score"):
            drawn[s[2].partition(" ")[2].removeprefix("val/").partition("/")[0]] += 1
    for _, _, key, _, _ in calls:
        whole[key.removeprefix("val/").partition("/")[0]] += 1
    assert all(drawn[sample] == whole[sample] for sample in drawn)
    if every == 1:
        assert drawn == whole


@pytest.mark.parametrize("every", [2, 8, 64])
@pytest.mark.parametrize("stride", [1, 2, 8, 64])
def test_the_share_is_the_same_whatever_the_order_of_the_data(every: int, stride: int) -> None:
    """Every second row may be an easy one."""
    indices = range(0, 6400 * stride, stride)
    calls: list[Call] = [("rewards", "score", str(i), 0.0, 1.0) for i in indices]
    found = [s for s in slices(draw(of_calls(calls), {0: every}, 512)) if s[1] == "score"]
    assert len(found) == pytest.approx(6400 / every, rel=0.25)


def test_a_number_that_grows_draws_some_of_the_same_samples() -> None:
    """So the samples that are drawn all the time can be followed through the whole run."""
    chosen = []
    for every in (1, 2, 4, 8):
        calls: list[Call] = [("rewards", "score", str(i), 0.0, 1.0) for i in range(500)]
        found = slices(draw(of_calls(calls), {0: every}, 512))
        chosen.append({s[2] for s in found if s[1] == "score"})
    for more, fewer in itertools.pairwise(chosen):
        assert fewer < more


def test_a_sample_that_is_drawn_keeps_its_calls_if_fewer_are_chosen_meanwhile() -> None:
    choice, keys = SampleChoice(), [str(i) for i in range(100)]
    assert all(choice.moves("running", key) for key in keys)
    choice.draw(64)
    assert all(choice.calls_for("begin", f"{key}/0") for key in keys)
    assert all(choice.calls_for("end", f"{key}/0") for key in keys)
    assert not choice._running


@pytest.mark.parametrize("first", [1, 4])
def test_all_states_of_a_sample_are_drawn_or_none_also_if_fewer_are_chosen_meanwhile(
    first: int,
) -> None:
    choice, drawn = SampleChoice(), Counter[str]()
    states = ("waiting", "running", "ready", "taken", "trained", "sealed", "retired")
    for step, name in enumerate(states):
        choice.draw(first << min(step, 4))
        for key in map(str, range(400)):
            drawn[key] += choice.moves(name, key)
    whole = sum(n == len(states) for n in drawn.values())
    assert {n for n in drawn.values() if n} == {len(states)}
    assert whole == pytest.approx(400 / first, rel=0.25)
    assert not choice._samples, "nothing is kept of a sample that left"


def spans_of(folder: Path, every: int, *, colocated: bool = False) -> list[Span]:
    folder.mkdir()
    clock = Clock()
    schedule = Schedule(
        ppo_mini_batch_size=1, placement=Placement.COLOCATED if colocated else Placement.SEPARATE
    )
    flow, replicas = FlowAccount(clock()), {"rollout-0": 1, "rollout-1": 1}
    account = DeviceAccount(clock(), schedule, flow, trainers=1, replicas=replicas)
    writer = TraceWriter(folder, 1, clock, print, every_s=0.01, states=account.states)
    account.tell(clock(), writer.put)
    writer._choice.draw(every)
    watch = Watch(clock, [flow, account, writer])
    for version in range(1, 30):
        life(watch, clock, version, [2 * version - 2, 2 * version - 1])
    with watch.span("rollout-1", "request", "val/7"):
        clock.now += 1
    writer.close()
    return read(folder)


@pytest.mark.parametrize("colocated", [False, True])
def test_the_lanes_of_a_report_are_the_same_with_few_samples(
    tmp_path: Path, colocated: bool
) -> None:
    found = {}
    for every in (1, 64):
        spans = columns(spans_of(tmp_path / str(every), every, colocated=colocated))
        found[every] = lanes(spans, colocated=colocated)
    assert sum(len(r) for r in spans.requests.values()) < 20, "few are drawn"
    assert len(found[1]) == (2 if colocated else 3)
    for one, other in zip(found[1], found[64], strict=True):
        assert one.name == other.name
        np.testing.assert_allclose(one.starts, other.starts)
        np.testing.assert_allclose(one.ends, other.ends)
        np.testing.assert_array_equal(one.states, other.states)


def test_a_thread_that_takes_too_much_draws_fewer_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_WINDOW_S", 500.0)  # on a slow machine, 2 s may pass in `work`
    run, path = Run(tmp_path, ["trace"]), tmp_path / "trace/attempt-001-000.json"

    def work(watch: Watch) -> None:
        writer = watch._watchers[0]
        assert isinstance(writer, TraceWriter)
        for number in (1, 2, 3):
            run.clock.now += 1  # each change has a time of its own, however fast the thread is
            moved = run.clock.now
            while writer._last < moved:  # and however slow
                life(watch, run.clock, 9, [50])
                time.sleep(0.01)
            writer._choice._since = (-1000.0, -1.0, -1)  # a second of work in some more seconds
            while not path.exists() or path.read_text().count("thinned") < 2 * number:
                life(watch, run.clock, 9, [50])
                time.sleep(0.01)

    run.go([1, 2], work=work, trace={"load": 1e-9, "every_s": 0.001})
    (note,) = run.notes
    assert "some samples only" in note and "report.trace_load=1 shows all" in note
    thinned = [span for span in read(tmp_path) if span.name == "thinned"]
    assert [span.facts["every"] for span in thinned] == [2, 4, 8]
    reader = RunReader(tmp_path).read()
    query(reader, "select count(*) from history")
    assert "some samples only" not in " ".join(reader.notes)
    query(reader, "select count(*) from spans")
    assert "some samples only" in " ".join(reader.notes)
    found = columns(read(tmp_path))
    found.replicas["rollout-0"] = np.array([[0.0, 1.0, 0.0]])
    (chart, *_) = timeline(reader, found)
    assert "does not show" in chart["note"] and found.every() == 8
    at = [span.start for span in thinned]
    assert found.every(0, at[0]) == 1 and found.every(at[0], at[1]) == 2 == found.every(0, at[1])


def test_few_lengths_of_a_trace_give_no_verdict() -> None:
    few, many = np.full(20, 10.0), np.full(20, 20.0)
    assert "all of them" in (said := lengths(many, few, "all of them")["how"])
    assert "prefers some lengths" in said
    said = lengths(many, few, "")["how"]
    assert "too few for a verdict" in said and "prefers" not in said and "%" not in said


class Load:
    """A thread with a load, and what its pace says."""

    def __init__(self, most: float) -> None:
        self.choice, self.now, self.used = SampleChoice(most), 0.0, 0.0
        assert self(0.5) is None, "the first look begins a window"

    def __call__(self, load: float, seconds: float = 2.5, calls: int = 1) -> int | None:
        self.now, self.used = self.now + seconds, self.used + load * seconds
        self.choice.calls += calls
        return self.choice.adapt(self.now, self.used)


def test_a_pace_follows_the_load() -> None:
    after = Load(0.01)
    assert [after(0.5), after(0.5), after(0.009), after(0.5, 1.0)] == [2, 4, None, None]
    assert after(0.5) == 8
    assert [after(0.002) for _ in range(11)] == [None] * 4 + [4] + [None] * 4 + [2] + [None]
    assert [after(1.0) for _ in range(7)] == [4, 8, 16, 32, 64, None, None]


def test_a_time_without_calls_says_nothing() -> None:
    """On shared devices the trainer has turns, in which nothing is drawn."""
    after, numbers = Load(0.015), []
    for _ in range(50):
        numbers += [after(0.05), after(0.05), after(0.0, calls=0), after(0.0, 30, calls=0)]
    assert [n for n in numbers if n] == [2, 4, 8, 16, 32, 64]


def test_a_thread_that_never_rests_is_thinned_to_the_end() -> None:
    """Events come faster than they are drawn. So it looks at its pace after each batch."""
    after, numbers = Load(0.015), []
    for _ in range(2000):
        numbers.append(after(1.0, 0.01))
    assert [n for n in numbers if n] == [2, 4, 8, 16, 32, 64]


def test_a_pace_of_a_whole_core_never_thins() -> None:
    after = Load(1.0)
    assert not any(after(1.0001) for _ in range(50))


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
