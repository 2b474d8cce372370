"""The parts of the trainer's time, and the totals that carry verl's names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.observe.timing import IDLE, SYNC, TOTALS, ActorClock, live_row, seconds_of, timing_row
from millrace.waits.registry import Registry, acting, part, within

seconds = st.floats(0, 1e4)
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
