"""Parts of an actor's time, metrics.jsonl and the output for people."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from millrace.observe.panel import BARS, sparkline
from millrace.observe.progress import Lines, Progress
from millrace.observe.sinks import JsonLines, make_sinks
from millrace.observe.timing import ActorClock
from millrace.waits.registry import Part, Registry, acting, part, within
from millrace.waits.stream import Event, Stream


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def actor(clock: Clock) -> Iterator[ActorClock]:
    """Make the body the actor `trainer` of a process of its own, whose states are timed."""
    registry, timed = Registry("driver", clock), ActorClock(clock.now, "trainer")
    with within(registry.root), acting("trainer"), registry.watched_by(timed):
        yield timed


def test_a_part_within_a_part_suspends_it_and_the_rest_is_other() -> None:
    clock = Clock()
    with actor(clock) as timed:
        clock.now += 1
        with part("step"):
            clock.now += 2
            with part("wait"):
                clock.now += 4
            clock.now += 8
        clock.now += 16
    assert timed.flush(clock.now) == {"other": 17.0, "step": 10.0, "wait": 4.0}


@given(
    st.lists(
        st.tuples(st.sampled_from(["in a", "in b", "out", "flush", "fail"]), st.floats(0, 10)),
        max_size=40,
    )
)
def test_the_parts_add_up_to_the_wall_time_whatever_nests_fails_or_is_flushed_on_the_way(
    moves: list[tuple[str, float]],
) -> None:
    clock = Clock()
    begin, total, stack = clock.now, 0.0, list[Part]()
    with actor(clock) as timed:
        for move, seconds in moves:
            clock.now += seconds
            if move.startswith("in"):
                stack.append(part(move).__enter__())
            elif move == "out" and stack:
                stack.pop().__exit__(None, None, None)
            elif move == "fail" and stack:
                error = ValueError("in the part")
                stack.pop().__exit__(type(error), error, None)
            elif move == "flush":
                total += sum(timed.flush(clock.now).values())
        total += sum(timed.flush(clock.now).values())
        assert total == pytest.approx(clock.now - begin)
        while stack:
            stack.pop().__exit__(None, None, None)


def test_a_flush_in_the_middle_of_a_part_divides_it() -> None:
    clock = Clock()
    with actor(clock) as timed:
        with part("step"):
            clock.now += 3
            assert timed.until(clock.now) == {"step": 3.0}
            assert timed.flush(clock.now) == {"other": 0.0, "step": 3.0}
            clock.now += 4
        assert timed.flush(clock.now) == {"step": 4.0, "other": 0.0}


def test_the_parts_of_another_actor_take_no_time_of_this_one() -> None:
    clock = Clock()
    with actor(clock) as timed, part("train"):
        clock.now += 1
        with acting("sync"), part("sync_transfer"):
            clock.now += 2
    assert timed.flush(clock.now) == {"other": 0.0, "train": 3.0}


def rows(path: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_drops_the_rows_that_it_makes_again_and_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path, None)
    for version in range(5):
        first.write(version, {"a": version + 0.5})
    first.close()
    path.write_text(path.read_text() + '{"version": 2, "a')
    second = JsonLines(path, 2)
    second.write(3, {"a": 33.0})
    second.close()
    kept = [{"version": v, "a": a} for v, a in enumerate((0.5, 1.5, 2.5, 33.0))]
    assert rows(path) == kept


def test_a_resumed_run_drops_rows_that_nobody_can_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"version": 1, "a": 1.5}\n{"version": 1, "b": "\xff"}\n{"version": 2, "a": 2.5}'
    )
    second = JsonLines(path, 2)
    second.write(3, {"a": 33.0})
    second.close()
    assert [row["version"] for row in rows(path)] == [1, 2, 3]


def test_a_row_is_on_disk_when_written_and_is_json_without_nan(tmp_path: Path) -> None:
    (sink,) = make_sinks(tmp_path, (), None)
    sink.write(1, {"a": math.nan, "b": math.inf, "c": 1.0})
    assert rows(tmp_path / "metrics.jsonl") == [{"version": 1, "a": None, "b": None, "c": 1.0}]
    sink.close()


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = make_sinks(tmp_path, ("tensorboard",), None)
    for sink in sinks:
        sink.write(3, {"reward/mean": 0.25})
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(3, 0.25)]


def test_tensorboard_shows_a_step_that_a_resumed_run_makes_again_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed_from, versions, value in ((None, (1, 2, 3), 0.25), (1, (2, 3), 0.5)):
        sinks = make_sinks(tmp_path, ("tensorboard",), resumed_from)
        for sink in sinks:
            for version in versions:
                sink.write(version, {"reward/mean": value})
            sink.close()
        time.sleep(1)  # files of one second have no order
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("reward/mean")]
    assert found == [(1, 0.25), (2, 0.5), (3, 0.5)]


def test_a_sparkline_rises_from_the_lowest_to_the_highest_bar() -> None:
    assert sparkline([float(i) for i in range(8)], 20) == BARS
    assert sparkline([1.0, 0.0, 1.0], 20) == "█▁█"
    assert sparkline([5.0, 5.0], 20) == "▁▁" and sparkline([], 20) == ""


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(1, 50))
def test_a_sparkline_is_never_wider_than_asked_and_shows_all_of_the_run(
    values: list[float], width: int
) -> None:
    line = sparkline(values, width)
    assert len(line) <= width and set(line) <= set(BARS) and bool(line) == bool(values)


def test_the_means_of_equal_runs_make_the_bars() -> None:
    assert sparkline([0.0, 0.0, 1.0, 3.0], 2) == "▁█"


def test_lines_show_each_version_if_asked(tmp_path: Path) -> None:
    path = tmp_path / "out"
    row = dict.fromkeys(("reward/mean", "staleness/mean", "actor/pg_loss", "actor/ppo_kl"), 0.5)
    row |= {"trainer/idle_ratio": 0, "rollouter/idle_ratio": 0, "rollouter/tokens_per_s": 0}
    for each_version, lines in ((True, 4), (False, 1)):
        with path.open("w") as file:
            progress = Progress(Lines(Console(file=file, width=300), every_s=60), "name", "mode")
            progress.training(0, 100, 0, 10, each_version=each_version)
            for version in (1, 2, 3):
                progress.trained(10, 0.5)
                progress.row(version, row)
        said = path.read_text().splitlines()
        assert len(said) == lines
        assert all("loss 0.5  ppo_kl 0.5  staleness" in line for line in said[1:])


def test_lines_say_what_a_version_came_to_and_when_the_run_ends(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "out"
    with path.open("w") as file:
        lines = Lines(Console(file=file, width=300), every_s=0.0)
        progress = Progress(lines, "name", "mode", clock)
        progress.phase("supervised warm-up", 3, 10, "loss 0.5")
        progress.training(20, 100, 2, 10)
        clock.now += 10
        progress.trained(20, 0.5)
        row = {"reward/mean": 0.5, "staleness/mean": 1.0, "rollouter/tokens_per_s": 1234.0}
        progress.row(4, row | {"trainer/idle_ratio": 0.25, "rollouter/idle_ratio": 0.5})
    said = path.read_text().splitlines()
    assert said[:2] == ["supervised warm-up 3/10 loss 0.5", "training"]
    assert said[-1].startswith(
        "version 4/10  samples 40/100  reward 0.500  staleness 1.00  idle trainer 25% rollouter 50%  1,234 tokens/s"
    )
    assert progress.state.left_s(clock.now) == pytest.approx(30.0), "60 samples to go at 2 a second"


def test_a_watcher_with_names_gets_the_events_of_these_names_alone() -> None:
    class Narrow:
        names = frozenset({"request"})

        def __init__(self) -> None:
            self.seen: list[str] = []

        def __call__(self, event: Event) -> None:
            self.seen.append(event.name)

    narrow, wide = Narrow(), list[str]()
    stream = Stream(time.monotonic, lambda event: wide.append(event.name))
    for watchers in ([], [narrow], []):
        with stream.watched_by(*watchers):
            for name in ("request", "score", "request"):
                stream.at("run", name)
    assert narrow.seen == ["request", "request"] and wide == 3 * ["request", "score", "request"]
