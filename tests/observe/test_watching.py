"""Parts of an actor's time and their totals, metrics.jsonl and the output for people."""

from __future__ import annotations

import io
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
from millrace.observe.progress import Lines, LiveView, Progress
from millrace.observe.sinks import JsonLines, make_sinks
from millrace.observe.timing import IDLE, SYNC, TOTALS, ActorClock, live_row, seconds_of, timing_row
from millrace.waits.registry import Event, Part, Registry, acting, part, within


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
        row["reward/mean"] = 0.5
        with path.open("w") as file:
            progress = Progress(Lines(Console(file=file, width=300), every_s=60), "name", "mode")
            progress.training(0, 100, 0, 10, each_version=each_version)
            for version in (1, 2, 3):
                progress.trained(10, 0.5)
                progress.row(version, row)
                row.pop("reward/mean", None)  # No response of a window ended.
        said = path.read_text().splitlines()
        assert len(said) == lines
        assert all("loss 0.5  ppo_kl 0.5  staleness" in line for line in said[1:])
        assert [("reward 0.500" in line) for line in said[1:]] == [True, False, False][: lines - 1]


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
    stream = Registry("run", time.monotonic, lambda event: wide.append(event.name))
    for watchers in ([], [narrow], []):
        with stream.watched_by(*watchers):
            for name in ("request", "score", "request"):
                stream.at("run", name)
    assert narrow.seen == ["request", "request"] and wide == 3 * ["request", "score", "request"]


seconds = st.just(0.0) | st.floats(1e-9, 1e4)  # a clock has nanoseconds
PARTS = (*IDLE, *SYNC, "train", "save_checkpoint", "switch", "other")
ENGINE = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


@given(
    st.dictionaries(st.sampled_from(PARTS), seconds),
    st.lists(st.dictionaries(st.sampled_from(ENGINE), seconds), max_size=3),
)
def test_parts_add_up_to_the_step_whatever_the_engine_measures(
    watch: dict[str, float], calls: list[dict[str, float]]
) -> None:
    found = seconds_of(watch, calls)
    parts = {name: value for name, value in found.items() if name not in TOTALS}
    whole = sum(watch.values())
    assert all(value >= 0 for value in found.values())
    assert sum(parts.values()) == pytest.approx(found["step"]) == pytest.approx(whole)
    inside = sum(found.get(name, 0.0) for name in (*ENGINE, "train_other"))
    assert inside == pytest.approx(found["train"]) == watch.get("train", 0.0)
    row = timing_row(found)
    shares = sum(row[f"timing_share/{name}"] for name in parts)
    assert shares == pytest.approx(1.0 if whole else 0.0)
    assert (
        0 <= row["fully_async/trainer/idle_ratio"] <= row["trainer/idle_ratio"] + 1e-9 <= 1 + 1e-6
    )


def test_totals_have_the_parts_of_their_names() -> None:
    watch = {name: 2.0**k for k, name in enumerate(dict.fromkeys(PARTS))}
    found = seconds_of(watch, [{"update_actor": 3.0}, {"update_actor": 1.0, "ref": 0.5}])
    assert found["gen"] == watch["wait_samples"] + watch["wait_prev_gen"]
    assert found["sync"] == sum(watch[name] for name in SYNC)
    assert (found["update_actor"], found["ref"]) == (4.0, 0.5)
    assert found["train_other"] == watch["train"] - 4.5
    idle = timing_row(found)["trainer/idle_ratio"] * found["step"]
    assert idle == pytest.approx(sum(watch[name] for name in IDLE))


def test_an_engine_with_a_fast_clock_keeps_the_shares_of_its_parts() -> None:
    found = seconds_of({"train": 2.0}, [{"ref": 1.0, "update_actor": 3.0}])
    assert (found["ref"], found["update_actor"], found["train_other"]) == (0.5, 1.5, 0.0)


def test_a_wait_moves_to_its_name_and_no_second_is_lost() -> None:
    now = 0.0
    registry = Registry("driver", lambda: now)
    clock = ActorClock(0.0, "trainer")

    def rename(seconds: float, source: str) -> None:
        facts = {"source": source, "target": "wait_prev_gen"}
        registry.at("trainer", "relabelled", seconds=seconds, **facts)

    with within(registry.root), acting("trainer"), registry.watched_by(clock):
        with part("wait_samples"):
            now = 3.0
        with part("train"):
            now = 7.0
        rename(2.0, "wait_samples")
        rename(1.0, "switch")  # there is no such second
        assert clock.until(now) == {"wait_samples": 1.0, "wait_prev_gen": 2.0, "train": 4.0}
        rename(9.0, "wait_samples")
    found = {"other": 0.0, "wait_samples": 0.0, "wait_prev_gen": 3.0, "train": 4.0, "switch": 0.0}
    assert clock.flush(now) == found


def test_rollouts_without_time_are_not_idle() -> None:
    assert live_row(0.0, 0.0)["fully_async/rollouter/idle_ratio"] == 0.0
    assert live_row(4.0, 0.0)["fully_async/rollouter/idle_ratio"] == 1.0


def test_a_run_has_the_panel_of_watch_and_one_for_its_start() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    view = LiveView(console)
    progress = Progress(view, "quickstart", "async_partial", lambda: 0.0)

    def drawn() -> str:
        console.print(view.picture(progress.state))
        return str(console.file.getvalue())  # type: ignore[attr-defined]

    progress.phase("supervised warm-up", 3, 10, "loss 0.5")
    assert "supervised warm-up  loss 0.5" in drawn()
    progress.training(0, 5120, 0, 80)
    progress.trained(64, 0.25)
    progress.row(1, {"staleness/mean": 0.5, "trainer/idle_ratio": 0.25})
    progress.validated(1, {"val/sort/mean@1": 0.75})
    shown = drawn()
    assert "running  version 1 of 80  samples 64 of 5,120" in shown
    assert "held out, version 1  sort/mean@1 0.750" in shown
    assert "0.50 mean, - max" in shown and "trainer 25%" in shown
    assert "no sign of life" not in shown, "the process that draws it lives"
