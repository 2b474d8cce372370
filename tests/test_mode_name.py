"""A run is called what its Schedule does, whatever mode its overrides began with."""

from pathlib import Path

import pytest

from millrace import recipe
from millrace.config import MODES
from millrace.mode_name import name_of

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"


def name(*overrides: str) -> str:
    config = recipe.load(RECIPE, overrides)
    return name_of(config.schedule, MODES, config.mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_without_overrides_keeps_its_name(mode):
    assert name(f"mode={mode}") == mode


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("on_sync=drain staleness_threshold=0 trigger_parameter_sync_step=1", "on_policy_pipeline"),
        (
            "on_sync=drain staleness_threshold=0 trigger_parameter_sync_step=4",
            "stream_off_policy",
        ),
        ("on_sync=drain", "async_staleness"),
        ("on_sync=swap", "async_swap"),
        ("staleness_threshold=2 trigger_parameter_sync_step=3", "async_partial"),
        ("staleness_threshold=0", "custom (from async_partial)"),
    ],
)
def test_overrides_of_a_mode_may_make_another_one(overrides, expected):
    keys = [f"async_training.{override}" for override in overrides.split()]
    assert name("mode=async_partial", *keys) == expected


def test_a_schedule_that_began_with_no_mode_is_custom_or_a_mode():
    schedule = recipe.load(RECIPE, ["mode=async_partial"]).schedule
    assert name_of(schedule, MODES) == "async_partial"
    assert name_of(schedule, {}) == "custom"
