"""The name of a run describes its Schedule, not the mode that its overrides began with."""

from __future__ import annotations

import pytest

from millrace.config import recipe
from millrace.schedule.modes import MODES, name_of
from millrace.schedule.schedule import Placement, Schedule


def name(*overrides: str) -> str:
    config = recipe.load("quickstart", overrides)
    return name_of(config.schedule, config.mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_without_overrides_keeps_its_name(mode: str) -> None:
    assert name(f"mode={mode}") == mode


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("on_sync=drain staleness_threshold=0 trigger_parameter_sync_step=1", "on_policy_pipeline"),
        ("on_sync=drain staleness_threshold=0 trigger_parameter_sync_step=4", "stream_off_policy"),
        ("on_sync=drain", "async_staleness"),
        ("on_sync=swap", "async_swap"),
        ("staleness_threshold=2 trigger_parameter_sync_step=3", "async_partial"),
        ("staleness_threshold=0", "custom (from async_partial)"),
    ],
)
def test_overrides_of_a_mode_may_make_another_one(overrides: str, expected: str) -> None:
    keys = [f"async_training.{override}" for override in overrides.split()]
    assert name("mode=async_partial", *keys) == expected


def test_a_schedule_that_started_from_no_mode_is_custom_or_a_mode() -> None:
    schedule = recipe.load("quickstart", ["mode=async_partial"]).schedule
    assert name_of(schedule) == "async_partial"
    shared = Schedule(ppo_mini_batch_size=1, placement=Placement.COLOCATED, staleness_threshold=1.0)
    assert name_of(shared) == "custom"
