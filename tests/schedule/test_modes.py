"""The table of modes: what a mode sets, what it fills in, and what it leaves alone."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import get_args

import pytest

from millrace.schedule.modes import MODES, ModeName
from millrace.schedule.schedule import Schedule


def test_the_table_is_frozen_and_has_every_name() -> None:
    assert tuple(MODES) == get_args(ModeName)
    with pytest.raises(TypeError):
        MODES["mine"] = MODES["async_swap"]  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        MODES["async_swap"].lookahead = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", MODES)
def test_a_mode_alone_makes_a_schedule(name: str) -> None:
    keys = MODES[name].over({})
    schedule = Schedule(ppo_mini_batch_size=4, **keys)
    assert schedule.colocated == MODES[name].colocated
    assert MODES[name].fixed.items() <= keys.items()


@pytest.mark.parametrize("name", MODES)
def test_a_mode_keeps_the_keys_that_it_does_not_set(name: str) -> None:
    mode = MODES[name]
    below = {"staleness_threshold": 0.75, "trigger_parameter_sync_step": 3, "require_batches": 2}
    before = dict(below)
    after = mode.over(below | {"lookahead": 9, "partial_rollout": True})
    assert after == below | mode.fixed and below == before


def test_a_default_counts_only_where_no_layer_has_a_value() -> None:
    assert MODES["async_swap"].over({"staleness_threshold": 0.0})["staleness_threshold"] == 0.5
    trigger = "trigger_parameter_sync_step"
    assert MODES["stream_off_policy"].over({trigger: 1})[trigger] == 4
    assert MODES["stream_off_policy"].over({trigger: 2})[trigger] == 2
