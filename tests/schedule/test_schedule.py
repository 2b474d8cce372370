"""The arithmetic of the Schedule, compared with worked examples of recipes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.schedule.route import route
from millrace.schedule.schedule import Schedule


def test_the_recipes_worked_examples() -> None:
    """Worked examples of the fully-async recipe. The first one trains a 7B model.

    | devices | mini-batch | batches | trigger | staleness |
    |---|---|---|---|---|
    | 64 + 64 | 32 | 4 | 4 | 0.5 |
    | 4 + 4 | 32 | 4 | 4 | 0.1 |
    """
    large = Schedule(
        ppo_mini_batch_size=32,
        require_batches=4,
        trigger_parameter_sync_step=4,
        staleness_threshold=0.5,
    )
    assert (large.step_size, large.window, large.capacity) == (128, 512, 768)
    small = Schedule(
        ppo_mini_batch_size=32,
        require_batches=4,
        trigger_parameter_sync_step=4,
        staleness_threshold=0.1,
    )
    assert small.capacity == 563
    assert small.optimizer_steps(512) == 16


def test_lag_bounds_of_the_modes() -> None:
    assert Schedule(ppo_mini_batch_size=8).lag_bound == 0
    assert Schedule(ppo_mini_batch_size=8, staleness_threshold=1).lag_bound == 1
    assert Schedule(ppo_mini_batch_size=8, staleness_threshold=4).lag_bound == 4
    assert Schedule(ppo_mini_batch_size=8, staleness_threshold=1, lookahead=9).lag_bound == 2


@given(
    st.integers(1, 50),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 1000),
    st.integers(1, 3),
)
def test_steps_are_counted_as_they_are_taken(
    mini: int, batches: int, trigger: int, samples: int, epochs: int
) -> None:
    schedule = Schedule(
        ppo_mini_batch_size=mini, require_batches=batches, trigger_parameter_sync_step=trigger
    )
    left, steps = samples, 0
    while left:
        take = min(left, schedule.step_size)
        steps += epochs * -(-take // mini)
        left -= take
    assert schedule.optimizer_steps(samples, epochs) == steps
    assert schedule.versions(samples) == -(-samples // schedule.window)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.7])
def test_capacity_is_not_lost_to_floating_point(share: float) -> None:
    assert Schedule(ppo_mini_batch_size=10, staleness_threshold=share).capacity == round(
        10 * (1 + share)
    )


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 5))
def test_routing_is_least_loaded_unless_home_is_near(loads: list[int], home: int) -> None:
    home %= len(loads)
    assert loads[route(None, loads)] == min(loads)
    chosen = route(home, loads)
    assert chosen == home or (loads[chosen] == min(loads) and loads[home] - loads[chosen] >= 8)
